"""Use this package's losses in ``accelerate``. ``save_state`` and ``load_state`` include the state of the loss."""

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.integrations.model_loss import ModelLoss


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, loader: DataLoader, loss: ContrastiveLoss
) -> tuple[nn.Module, Optimizer, DataLoader, ModelLoss]:
    """Prepare model, optimizer and loader like ``accelerator.prepare``; also return the loss as a :class:`ModelLoss`.

    Create the learning rate schedule after this call.

    Args:
        model: Two-tower model of OpenCLIP (``output_dict=True``) or ``transformers``.
        loader: Training data, with an index (``openclip_ext.data.with_index``) if the loss needs it.
        loss: Loss from ``openclip_ext.create_loss``.

    Raises:
        ValueError: The loss does not support this loop, which accumulates gradients or repeats samples at the end of an epoch,
            or the processes may have different numbers of batches.

    Example:
        >>> model, optimizer, loader, loss = prepare(accelerator, model, optimizer, loader, loss)
        >>> for epoch in range(epochs):
        ...     loss.loss.start_epoch(epoch)
        ...     loader.set_epoch(epoch)
        ...     for batch in loader:
        ...         index = batch.pop("index")
        ...         accelerator.backward(loss(model(**batch), index))
        ...         loss.step(optimizer)
        ...         optimizer.zero_grad()
        ...     accelerator.save_state(folder)
    """
    model_loss = ModelLoss(loss, model)
    drops_last = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
    repeats = accelerator.num_processes > 1 and not drops_last
    if repeats and not accelerator.even_batches:  # a process with one more batch would wait for the others
        raise ValueError(
            "even_batches=False needs equally many batches in all processes: set drop_last=True in the DataLoader"
        )
    model_loss.check_loop(accelerator.gradient_accumulation_steps, repeats)
    model_loss.separate_rate(optimizer)
    accelerator.register_for_checkpointing(model_loss)
    return (*accelerator.prepare(model, optimizer, loader), model_loss)
