"""Evaluations of the CLIP-Lite paper (Shrivastava et al., 2021): linear probes, concept editing, visual grounding."""
