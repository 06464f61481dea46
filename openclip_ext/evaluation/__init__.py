"""Measure models: DataComp's tasks, ImageNet, retrieval, and reports of them."""
