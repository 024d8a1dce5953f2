"""Configuration files: YAML -> Config, with errors that name file, line and key."""

from milldam.config_file.loading import LoadedConfig, load_config, parse_config
from milldam.config_file.schema import json_schema

__all__ = ["LoadedConfig", "json_schema", "load_config", "parse_config"]
