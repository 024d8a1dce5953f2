"""Settings: YAML files, options and keyword arguments -> one checked configuration.

settings          the fields of a configuration, with defaults; the rules of each step are in `milldam.rules`
checking          the one check: plain values with their places -> settings, or errors that say where
loading           a YAML file or a dict, options and overrides -> plain values with their places
legacy            files of Krill -> ours
"""
