"""Services of a training run: signals, heartbeats, run folder, logs and profiles."""
