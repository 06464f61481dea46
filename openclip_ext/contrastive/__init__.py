"""Components that all global contrastive losses share. The methods are in ``openclip_ext/losses/``."""
