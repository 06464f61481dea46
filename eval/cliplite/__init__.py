"""Run the evaluations of CLIP-Lite (Shrivastava et al., 2021): linear probes, concept editing, visual grounding."""
