"""Evaluate models on DataComp's tasks, ImageNet and retrieval, and write reports."""
