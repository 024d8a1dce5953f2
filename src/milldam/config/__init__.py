"""Settings: YAML files, options and keyword arguments -> one checked configuration.

settings    what can be set, with defaults
loading     YAML -> Config, with errors that name file, line and key
legacy      files of Krill
"""
