"""A tiny CLIP model that trains fast, with every loss and in every way in which training can compute a step."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from open_clip import CoCa
from open_clip.model import CLIP, convert_weights_to_lp
from torch import Tensor, nn

from openclip_ext import distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import prepare_for
from openclip_ext.data.text_groups import TextGroups, group_texts, texts_of
from openclip_ext.losses import registry
from openclip_ext.training import parallel
from openclip_ext.training.config import OptimizerConfig, ParallelConfig
from openclip_ext.training.guard import StepGuard
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import Batch, StepSettings, TrainStep

CPU = torch.device("cpu")
BFLOAT16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
FLOAT16 = functools.partial(torch.autocast, "cpu", torch.float16)
BATCH, SAMPLES, WIDTH = 8, 40, 16
IMAGE, CONTEXT, VOCABULARY = 16, 6, 50

# Options with which all parts of a loss become active within three steps.
_OPTIONS: dict[str, dict[str, Any]] = {
    "openclip": {"local_loss": True, "gather_with_grad": True},
    "amorlip": {"gather_stage2": True, "fit_every": 2, "target_every": 2, "normalizer_lr": 1e-3},
    "neuclip": {"prototypes": 12, "normalizer_updates": 2, "restart_every": 2, "normalizer_lr": 1e-2},
    "neuclip-paper": {"prototypes": 12, "normalizer_updates": 2, "restart_every": 2, "normalizer_lr": 1e-2},
    "queueclip": {"prototypes": 12},
}
# Every registered loss is included, so the tests with one process, two processes and shards also cover new losses.
LOSSES = {name: _OPTIONS.get(name, {}) for name in registry.list_losses()}


def tiny_model(tower: str = "vit", layers: int = 2) -> CLIP:
    """Return the tiny model; every call returns the same weights."""
    torch.manual_seed(0)
    vision = {"image_size": IMAGE, "patch_size": 8, "layers": layers, "width": 16, "head_width": 8}
    if tower == "resnet":
        vision = {"image_size": 32, "patch_size": None, "layers": [1, 1, 1, 1], "width": 8}
    if tower == "timm-resnet":
        vision = {"image_size": 32, "timm_model_name": "resnet10t", "timm_model_pretrained": False, "timm_pool": "avg"}
    text = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": layers}
    return CLIP(WIDTH, vision, text, output_dict=True)


def tiny_captioner() -> CoCa:
    """Return a tiny model with a text decoder."""
    torch.manual_seed(0)
    pooler = {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    vision = {"image_size": IMAGE, "patch_size": 8, "layers": 1, "width": 16, "head_width": 8, **pooler}
    text = {"vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 1}
    decoder = text | {"context_length": CONTEXT - 1}
    caption = text | {"context_length": CONTEXT, "embed_cls": True, "output_tokens": True}
    model = CoCa(WIDTH, decoder, caption, vision)
    nn.init.normal_(model.text_decoder.text_projection, std=0.25)  # OpenCLIP leaves it uninitialized
    return model


def tiny_loss(name: str, **options: Any) -> ContrastiveLoss:
    """Return the loss with its options in ``LOSSES``, updated with ``options``."""
    return registry.create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **(LOSSES[name] | options))


def prepare(model: nn.Module, loss: ContrastiveLoss) -> None:
    """Prepare a model as training does: set the initial temperature, and freeze parameters that the loss does not train."""
    if loss.initial_logit_bias is not None:
        model.logit_bias = nn.Parameter(torch.full_like(model.logit_scale, loss.initial_logit_bias))
    prepare_for(loss, model)


def tiny_batch(number: int, views: int = 1, dtype: torch.dtype = torch.float32, size: int = IMAGE) -> Batch:
    """Return the batch of all ranks in step ``number``. Captions end with the largest token, which marks the end of text."""
    generator = torch.Generator().manual_seed(100 + number)
    shape = (3, size, size) if views == 1 else (views, 3, size, size)
    text = torch.randint(1, VOCABULARY - 1, (BATCH, CONTEXT), generator=generator)
    text[:, -1] = VOCABULARY - 1
    return {
        "image": torch.randn(BATCH, *shape, generator=generator).to(dtype),
        "text": text,
        "index": torch.randperm(SAMPLES, generator=generator)[:BATCH],
    }


def groups_by_length(texts: Tensor) -> TextGroups:
    """Return texts ``(B, L)`` in a group for each length, without padding."""
    lengths = (texts.argmax(dim=1) + 1).tolist()
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups = [[row for row in order if lengths[row] == length] for length in sorted(set(lengths))]
    places = torch.tensor(order).argsort()
    return TextGroups(tuple(texts[rows, : lengths[rows[0]]] for rows in groups), places, sum(lengths))


def parts_of(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into ``count`` equal parts, in order."""
    chunks = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: chunks[key][number] for key in chunks} for number in range(count)]


OPTIMIZER = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.98, eps=1e-6)


@dataclass(frozen=True)
class Way:
    """How the steps of a training run are computed, in one process or in several."""

    tower: str = "vit"  # or "resnet", "timm-resnet"
    layers: int = 2  # of the text tower, and of a "vit"
    micro_batches: int = 1
    clip: float | None = None
    text_lengths: tuple[int, ...] = ()  # if given, the captions have these lengths, in turn
    groups_texts: bool = (
        False  # whether each length is a group; sharded blocks are gathered once, so they get one group
    )
    checkpointing: bool = False
    compiled: bool = False
    backend: str = "eager"  # compiler of a ``compiled`` model; this one is fast
    dtype: torch.dtype = torch.float32  # of images and parameters; if float64, also of the state of the loss
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    scale: float | None = None  # initial scale of a GradScaler
    optimizer: OptimizerConfig = OPTIMIZER
    on_device: bool = False  # whether the non-finite step guard decides on the device, as on a GPU, or on the host
    norms_in_float32: bool = False  # whether only matrices have ``dtype``, as with ``--precision bf16``
    sharded: bool = False  # whether several processes shard the parameters (FSDP2) or replicate them (DDP)
    reshard: bool = True  # whether full parameters are freed between forward and backward
    device: torch.device = CPU
    options: dict[str, Any] = field(default_factory=dict)  # of the loss, in addition to ``LOSSES``


class TinyTraining:
    """A model, a loss and an optimizer that train on fixed batches; each rank takes its part of a batch."""

    def __init__(self, name: str, way: Way) -> None:
        self.way, self.loss = way, tiny_loss(name, **way.options).to(way.device)
        model = tiny_model(way.tower, way.layers).to(way.device)
        prepare(model, self.loss)
        if way.checkpointing:
            model.set_grad_checkpointing()
        convert_weights_to_lp(model, way.dtype) if way.norms_in_float32 else model.to(way.dtype)
        if way.dtype == torch.float64:
            self.loss.double()
        config = ParallelConfig(way.sharded, keep_gathered=not way.reshard, compile=way.compiled)
        self.model = parallel.distribute(model, config, way.device, keep_whole=False)
        self.optimizer = create_optimizer(self.model, way.optimizer, self.loss.logit_scale_lr, self.loss.model_head())
        scaler = None if way.scale is None else torch.amp.GradScaler(way.device.type, init_scale=way.scale)
        # Compile the full model, as training does. A sharded model compiles its blocks instead.
        stepped = torch.compile(self.model, backend=way.backend) if way.compiled and not way.sharded else self.model
        settings = StepSettings(way.device, way.dtype, way.autocast, way.clip, groups_texts=way.groups_texts)
        self.step = TrainStep(stepped, self.loss, self.optimizer, settings, scaler)
        if way.on_device:
            self.step.guard = StepGuard(self.model, self.loss, on_host=False)
        self.model.train()

    def batch(self, number: int) -> Batch:
        """Return the batch of all ranks in step ``number``."""
        batch = tiny_batch(number, self.loss.views, size=IMAGE if self.way.tower == "vit" else 32)
        for row, length in zip(batch["text"], itertools.cycle(self.way.text_lengths)):
            row[length - 1 :] = 0
            row[length - 1] = VOCABULARY - 1
        return batch

    def take(self, number: int, spoil: Callable[[Batch], None] | None = None) -> dict[str, Tensor]:
        """Take a step and return the terms of the loss. ``spoil`` first changes the full batch in place."""
        batch = self.batch(number)
        if spoil is not None:
            spoil(batch)
        own = parts_of(batch, distributed.world_size())[distributed.rank()]
        micro_batches = parts_of(own, self.way.micro_batches)
        if self.way.groups_texts:
            group = (lambda texts: group_texts(texts, 1)) if self.way.sharded else groups_by_length
            micro_batches = [batch | {"text_groups": group(texts_of(batch))} for batch in micro_batches]
        return self.step(micro_batches, number)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of model, optimizer and loss, without DDP's prefix. Only rank 0 returns sharded tensors."""
        model = {name.removeprefix("module."): value for name, value in self.model.state_dict().items()}
        optimizer = parallel.optimizer_state_dict(self.model, self.optimizer)
        return tensors({"model": model, "optimizer": optimizer, "loss": self.loss.state_dict()})


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Map dotted names to the values in nested dictionaries, lists and tuples."""
    if not isinstance(state, dict | list | tuple):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {name: value for key, item in items for name, value in flat(item, f"{prefix}.{key}").items()}


def tensors(state: Any) -> dict[str, Tensor]:
    """Map dotted names to copies of the tensors in a nested state."""
    return {name: value.detach().clone() for name, value in flat(state).items() if isinstance(value, Tensor)}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float) -> None:
    """Assert that tensors with the same name are close; NaN equals NaN."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        told = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, equal_nan=True, msg=told)
