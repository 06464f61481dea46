"""The evaluations of the CLIP-Lite paper: linear probes, concept editing, and grounding of phrases."""
