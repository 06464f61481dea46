"""The machinery that all global contrastive losses share. No method is named here: those are in ``openclip_ext/losses/``."""
