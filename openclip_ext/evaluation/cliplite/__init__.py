"""CLIP-Lite's evaluations: probes, editing, grounding."""
