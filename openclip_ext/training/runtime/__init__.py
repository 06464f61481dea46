"""What surrounds a training: signals, heartbeat, run folder, logs, profiles."""
