"""Settings: YAML files, options and keyword arguments -> one checked configuration.

settings          what can be set, with defaults; the rules of each step are in `milldam.rules`
checking          the one check: plain values with their places -> settings, or errors that say where
yaml_values       YAML -> plain values with their places; `--set a.b=c` put over them
loading           a file, a dict, options and overrides -> Config
other_words       what other tools call our settings
legacy            files of Krill -> ours
"""
