"""The files of checkpoints: their format, checksums, and the newest good one."""
