"""The losses in other people's trainers: one file each. Page: ``docs/integrations.md``."""
