"""``openclip-ext plan`` predicts the sizes of real states, and the communication of two real ranks."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import open_clip
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import set_training_mode
from openclip_ext.diagnostics import plan
from openclip_ext.diagnostics.dry_run import PeakMemory, activation_bytes, dry_run
from openclip_ext.diagnostics.meta_run import META, build_on_meta, run_to_plan
from openclip_ext.losses.registry import create_loss, list_losses
from openclip_ext.training.guard import StepGuard
from openclip_ext.training.model import BuiltModel, build_model
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import StepSettings, TrainStep
from tests.distributed.pool import two_ranks
from tests.training.tiny import BATCH, OPTIMIZER, WIDTH, parts_of, prepare, tensors, tiny_batch, tiny_model

CPU = torch.device("cpu")
# Every loss with some options, and additional combinations of parts.
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in list_losses()},
    "amorlip": {"fit_every": 3, "previous_weight": 0.0},
    "neuclip": {"prototypes": 24, "restart_every": 2},
    "queueclip": {"prototypes": 24},
}
STEPS = {"amorlip": 3}
SAMPLES, PLAIN = 1000, "--dataset-type synthetic --model demo-vit --precision fp32"


def planned(flags: str, world_size: int = 1, samples: int = SAMPLES) -> plan.Plan:
    """Return the plan of a run with these flags of training and a batch of :data:`BATCH` per rank."""
    size = f"--train-num-samples {samples} --batch-size {BATCH}"
    config, run = run_to_plan(f"{PLAIN} {size} {flags}".split(), world_size)
    return plan.Plan(run, build_on_meta(config, run), 1e12)


def create(name: str, **more: Any) -> ContrastiveLoss:
    common = {"local_loss": True, "gather_with_grad": True} if name == "openclip" else {}
    return create_loss(name, embed_dim=WIDTH, num_samples=40, **common, **(CASES[name] | more))


@pytest.mark.parametrize("name", list_losses())
def test_state_is_that_of_the_real_loss(name, monkeypatch):
    monkeypatch.setattr(plan, "activation_bytes", lambda *_: (1, 2))  # counting the model's activations takes a second
    flags = "".join(f" --loss-option={option}={value}" for option, value in CASES[name].items())
    whole = planned(f"--loss {name}{flags}")
    for world_size in (1, 4):
        monkeypatch.setattr(distributed, "world_size", lambda size=world_size: size)
        real = create_loss(name, embed_dim=whole.embed_dim, num_samples=SAMPLES, **CASES[name])
        state = sum(tensor.nbytes for tensor in tensors(real.state_dict()).values())
        assert whole.row(world_size)["state"] == state


def _counted(name: str) -> dict[str, float]:
    """Train a few steps on this rank; return the bytes of each kind of communication, as passed to ``torch.distributed``."""
    counts: Counter = Counter()
    isend = dist.isend
    sizes = {
        "all_gather_into_tensor": ("all-gather", lambda result, tensor: result.nbytes),
        "all_gather": ("all-gather", lambda results, tensor, *_: sum(result.nbytes for result in results)),
        "all_reduce": ("all-reduce", lambda tensor: tensor.nbytes),
        # With gloo, the backward pass of OpenCLIP's gather uses scatter.
        "scatter": ("reduce-scatter", lambda own, parts=None, *_: sum(part.nbytes for part in parts or [])),
        "batch_isend_irecv": ("send", lambda ops: sum(op.tensor.nbytes for op in ops if op.op is isend)),
    }

    def counting(function: Callable, kind: str, size: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            counts[kind] += size(*args)
            return function(*args, **options)

        return call

    loss = create(name)
    model = tiny_model()
    prepare(model, loss)
    optimizer = create_optimizer(model, OPTIMIZER, loss.logit_scale_lr, loss.model_head())
    step = TrainStep(model, loss, optimizer, StepSettings(torch.device("cpu"), input_dtype=torch.float32))
    loss.start_epoch(0)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(distributed, "check_equal_sizes"))  # only CPU ranks do this
        for function, (kind, size) in sizes.items():
            patches.enter_context(mock.patch.object(dist, function, counting(getattr(dist, function), kind, size)))
        for number in range(STEPS.get(name, 1)):
            step([parts_of(tiny_batch(number, loss.views), 2)[dist.get_rank()]])
    return dict(counts)


@pytest.mark.parametrize("name", list(CASES))
def test_communication_is_what_two_ranks_send(name):
    """Of two ranks, each sends half of the gathered or scattered bytes, and all bytes of an all-reduce."""
    steps = STEPS.get(name, 1)
    sent, _ = dry_run(lambda: create(name), BATCH // 2, WIDTH, 2, steps)
    for rank in two_ranks().run(_counted, name):
        halved = sum(rank.get(kind, 0) for kind in ("all-gather", "reduce-scatter")) / 2
        assert round(steps * sent) == halved + rank.get("all-reduce", 0) + rank.get("send", 0) > 0
    assert dry_run(lambda: create(name), BATCH, WIDTH, 1)[0] == 0


@pytest.mark.parametrize("name", ["openclip", "fastclip", "amorlip", "neuclip", "simclr"])
def test_a_run_without_values_works_in_the_memory_of_a_real_one(name):
    torch.manual_seed(0)
    features = [torch.nn.functional.normalize(torch.randn(64, WIDTH), dim=1).requires_grad_() for _ in range(2)]
    loss, scale, memory = create(name), torch.tensor(10.0, requires_grad=True), PeakMemory()
    index = torch.arange(64) % 40
    with memory:
        guard = StepGuard(torch.nn.Module(), loss)
        guard.before_loss()
        sum(loss(*features, scale, index=index, output_dict=True).values()).backward()
    # The peaks are only nearly equal, because some integer sums and checks of indices run on one device only.
    assert dry_run(lambda: create(name), 64, WIDTH, 1)[1] == pytest.approx(memory.peak, rel=0.05)


def allocated(built: BuiltModel, precision: str, views: int) -> int:
    """Return the peak bytes of a forward and backward pass in PyTorch's profiler, plus the bytes of the images."""
    model = built.model
    set_training_mode(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    images = torch.rand(24 * views, 3, 32, 32, dtype=open_clip.get_input_dtype(precision) or torch.float32)
    texts = torch.randint(1, 1000, (24, model.context_length))

    def run() -> None:
        with compat.autocast_context(precision, CPU)():
            outputs = model(images, texts if views == 1 else None)
        features = [outputs["image_features"], outputs["text_features"]][: 3 - views]
        trained = [value for value in features if value.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(value) for value in trained])

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak + images.nbytes


@pytest.mark.parametrize(
    ("flags", "views"),
    [
        ("", 1),
        ("", 2),
        ("--grad-checkpointing", 1),
        ("--precision amp_bf16", 1),
        ("--precision pure_bf16", 1),
        ("--model demo-resnet", 1),
        ("--lock-image", 1),
        ("--lora-rank 4", 1),
    ],
)
def test_activations_are_what_a_pass_allocates(flags: str, views: int):
    _, run = run_to_plan([*PLAIN.split(), *flags.split()], 1)
    meta, real = (build_model(run.model, device, seed=0) for device in (META, CPU))
    (needed,) = activation_bytes(meta.model, [24], run.step.precision, views)
    assert needed == pytest.approx(allocated(real, run.step.precision, views), rel=0.02)


@pytest.mark.parametrize(
    ("flags", "is_trained"),
    [
        ("--loss openclip", lambda name: True),
        ("--loss simclr", lambda name: name.startswith("visual.")),
        ("--loss openclip --lock-image", lambda name: not name.startswith("visual.")),
    ],
)
def test_only_trained_parameters_have_a_gradient(flags: str, is_trained: Callable[[str], bool]):
    model = open_clip.create_model("demo-vit", device="meta")
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    trained = sum(size for name, size in sizes.items() if is_trained(name))
    row = planned(flags, 2).asked
    assert row["gradient sent"] == trained  # of two ranks, each sends all bytes once
    assert row["model"] == 5 * trained + sum(sizes.values()) - trained


def test_openclips_loss_composed_of_parts_needs_less_memory():
    sizes = "--batch-size 16384", 1, 10**6
    whole, composed = (
        planned(f"--loss openclip {more} {sizes[0]}", *sizes[1:]) for more in ("", "--normalizer minibatch")
    )
    assert composed.asked["work"] < whole.asked["work"] / 3


# --- the report -------------------------------------------------------------------------------------------------------

COMMAND = ["--samples", "1e9", "--world-size", "64", "--global-batch", "5120", "--model", "demo-vit"]


def test_a_plan_for_a_billion_samples(capsys):
    plan.main([*COMMAND, "--loss", "fastclip", "--gpu-memory", "0.2"])
    text = capsys.readouterr().out
    assert "n = 1,000,000,000, global batch 5120, 64 ranks" in text
    assert "WARNING: 64 ranks: a GPU needs" in text and "does not fit" in text
    assert "0.116 GiB a GPU (7.451 GiB in all, 8 bytes each)" in text
    lines = text[text.index("ranks  batch") :].splitlines()[1:]
    table = {int(line.split()[0]): line.split() for line in lines if line.split()[0].isdigit()}
    assert list(table) == [2**power for power in range(11)]
    assert float(table[1][4]) == pytest.approx(8e9 / 2**30, abs=0.01)
    assert table[64][1] == "80"
    # With B = 5120 and d = 64, a step gathers 2·B·d values, 2·B scalars and B indices. It reduces 2·B + 2 scalars.
    gathered, reduced = (2 * 5120 * 64 + 2 * 5120) * 4 + 5120 * 8, 2 * 5120 * 4 + 2 * 4
    assert float(table[64][7]) == pytest.approx((gathered + 2 * reduced) * 63 / 64 / 2**20, abs=0.01)


def test_the_plan_says_which_batch_fits(capsys, monkeypatch):
    # This saves time, because OpenCLIP's gather has one operation per rank.
    monkeypatch.setattr(plan, "LARGEST_WORLD", 2)
    sizes = ["--samples", "1e6", "--global-batch", "4096", "--gpu-memory", "1"]
    command = [*sizes, "--model", "demo-vit", "--loss", "openclip"]
    plan.main(command)
    text = capsys.readouterr().out
    assert "without these flags, each rank stores a full B x B matrix" in text
    largest = int(text.partition("does not fit; up to ")[2].split()[0])
    assert 512 <= largest < 4096
    plan.main([*command, "--accum-freq", "8", "--precision", "fp32"])
    text = capsys.readouterr().out
    assert ": fits; up to" in text and "WARNING" not in text
    plan.main([*command, "--normalizer", "minibatch"])  # computes the similarities in chunks
    assert "B x B" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model ViT-B-17", "local-dir:FOLDER"),
        ("--loss neuclip --gamma 0.5", "--gamma: not used by the loss 'neuclip"),
        ("--world-size 48", "a multiple of the number of processes, 48"),
        ("--samples 100", "too few samples"),
        ("--lr 0", "--lr"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan.main([*COMMAND, *arguments.split()])


def test_a_plan_needs_the_number_of_samples():
    with pytest.raises(ValueError, match="--samples"):
        plan.main(["--model", "demo-vit"])


@pytest.mark.parametrize("given", ["--samples 1e4", "--train-data {shards}"])
def test_the_flags_of_train_describe_the_run(given, shards, capsys):
    flags = "--model demo-vit --batch-size 8 --accum-freq 2 --world-size 2 --precision fp32 --lr 1e-3"
    plan.main([*flags.split(), *given.format(shards=shards).split()])
    samples = "84" if "data" in given else "10,000"
    assert f"n = {samples}, global batch 32, 2 ranks" in capsys.readouterr().out
