"""Evaluate models on DataComp's tasks, ImageNet and a user's data, and write reports."""
