"""The evaluations of the CLIP-Lite paper: linear probes, concept editing, and phrase grounding."""
