"""Use this package's losses in other training libraries, one file per library. See ``docs/integrations.md``."""
