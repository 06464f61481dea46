"""The batch's own estimate: biased, and what OpenCLIP's loss does in effect. The baseline of every comparison."""

from openclip_ext.losses.block import Block
from openclip_ext.normalizers.base import Estimate, Normalizer


class MinibatchNormalizer(Normalizer):
    """``α_i = log(ε + g_i(batch))`` (NeuCLIP, section 3, mini-batch approximation). No state."""

    def predict(self, block: Block) -> Estimate:
        """See :class:`Normalizer`."""
        return Estimate(block.log_estimate)
