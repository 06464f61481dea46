"""Measure the error of a loss's log-normalizers, compared with exact log-normalizers (NeuCLIP, Appendix B.6).

For sampled anchors ``i``, the exact ``α*_i = log(ε + g_i(S))`` [NeuCLIP 9] is computed over all ``n`` training embeddings
``S`` of a model. An estimator's error is the mean of ``(α_i − α*_i)²``. The mini-batch estimate with the run's batch size is
the baseline. The program can measure several checkpoints and runs, as in NeuCLIP, Figures 2c and 4.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.objectives import NEGATIVES_MEAN, PARTITION_MEAN
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.files import json_lines
from openclip_ext.files.writing import output_path, write_text
from openclip_ext.losses.openclip import OpenClipLoss

DEFAULT_ANCHORS = 10_000
_CHUNK = 1024
# Accepted difference from unit norm. Rounding to half precision causes a smaller difference.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Error:
    """Mean squared error of log-normalizers.

    Attributes:
        mean, image, text: Error over all anchors, over image anchors, and over text anchors.
        bias: Mean of ``α − α*`` over all anchors.
        factor: Median of ``exp|α − α*|``, the factor by which a normalizer is too large or too small.
        factor_low, factor_high: The 5 % and 95 % quantiles of this factor.
    """

    mean: float
    image: float
    text: float
    bias: float
    factor: float
    factor_low: float
    factor_high: float

    @classmethod
    def of(cls, estimate: Tensor, exact: Tensor) -> "Error":
        """Compare estimates ``(2, A)`` for image and text anchors with the exact values."""
        difference = estimate.double() - exact.double()
        image, text = difference.square().mean(dim=1).tolist()
        low, median, high = difference.abs().flatten().quantile(difference.new_tensor([0.05, 0.5, 0.95])).exp().tolist()
        return cls((image + text) / 2, image, text, difference.mean().item(), median, low, high)


@dataclass(frozen=True)
class EstimationError:
    """Result of :func:`measure`.

    Attributes:
        estimator: Error of ``loss.log_normalizers``. None means that the loss only has the mini-batch estimate, or that its
            objective has an :class:`Estimand` from outside this package.
        minibatch: Error of the mini-batch estimate with batches of ``batch_size``.
        samples: Number of embeddings from which exact log-normalizers were computed.
        temperature: Median temperature of all anchors.
    """

    estimator: Error | None
    minibatch: Error
    anchors: int
    samples: int
    batch_size: int
    temperature: float


@torch.no_grad()
def exact_log_normalizers(
    image: Any, text: Any, anchors: Any, tau: Any, *, eps: float = 0.0, include_positive: int | None = None
) -> Tensor:
    """Compute exact log-normalizers ``α*`` of some anchors over all embeddings [NeuCLIP 9], in float64 and in chunks.

    ``log g_i = logsumexp_{j≠i} (s_ij − s_ii)/τ_i − log(n−1)``; ``α*_i = log(ε + g_i)``.

    Args:
        image, text: ``(n, d)`` unit embeddings, tensors or arrays.
        anchors: ``(A,)`` rows of the anchors.
        tau: One temperature, or temperatures ``(2, A)`` of the image anchors and the text anchors.
        eps: The constant ε.
        include_positive: Global batch size ``B``, if the loss's normalizers include the positive pair
            (``loss.normalizers_include_positive``): ``α*_i = log((1 + (B−1)·g_i)/B)``. None (default) means they do not.

    Returns:
        ``(2, A)`` float64 for the image anchors and the text anchors, on the device of ``anchors``.

    Raises:
        ValueError: The shapes do not match, or there are fewer than 2 samples.
    """
    image, text = _pairs(image, text)
    anchors = torch.as_tensor(anchors)
    anchors = torch.arange(len(image), device=anchors.device)[anchors]  # a negative row counts from the end
    tau = torch.as_tensor(tau, dtype=torch.float64, device=anchors.device).expand(2, len(anchors))
    sides = [_log_g(*pair, anchors, tau[side]) for side, pair in enumerate(((image, text), (text, image)))]
    log_g = torch.stack(sides)
    if include_positive is None:
        return log_math.log_add(log_g, eps)
    negatives = log_g.new_tensor(include_positive - 1)
    return log_math.log_add(log_g + torch.log(negatives), 1.0) - torch.log(negatives + 1)


def _pairs(image: Any, text: Any) -> tuple[Tensor, Tensor]:
    image, text = torch.as_tensor(image), torch.as_tensor(text)
    if image.ndim != 2 or image.shape != text.shape or len(image) < 2:
        raise ValueError(
            f"image and text: expected the same shape (n, d), n >= 2, found {tuple(image.shape)} and {tuple(text.shape)}"
        )
    return image, text


def _log_g(own: Tensor, other: Tensor, anchors: Tensor, tau: Tensor) -> Tensor:
    """Return ``log g`` ``(A,)`` of the rows ``anchors`` of ``own``: each row ``i`` against all rows ``j ≠ i`` of ``other``."""
    device = anchors.device
    rows = own[anchors.to(own.device)].to(device, torch.float64)
    positive = (rows * other[anchors.to(other.device)].to(device, torch.float64)).sum(dim=1)
    total = torch.full_like(positive, -torch.inf)
    for first in range(0, len(other), _CHUNK):
        chunk = other[first : first + _CHUNK].to(device, torch.float64)
        exponents = (rows @ chunk.T).sub_(positive[:, None]).div_(tau[:, None])
        position = anchors - first
        inside = torch.nonzero((position >= 0) & (position < len(chunk))).squeeze(1)
        exponents[inside, position[inside]] = -torch.inf
        total = torch.logaddexp(total, torch.logsumexp(exponents, dim=1))
    return total - torch.log(total.new_tensor(len(other) - 1))


@torch.no_grad()
def measure(
    loss: ContrastiveLoss,
    image: Any,
    text: Any,
    logit_scale: float | Tensor,
    *,
    batch_size: int,
    index: Any = None,
    anchors: int = DEFAULT_ANCHORS,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> EstimationError:
    """Measure the error of a loss's log-normalizers (NeuCLIP, Appendix B.6) without changing the loss's state.

    Anchors are sampled without replacement. The loss estimates their log-normalizers in shuffled batches of the run's size,
    because some estimators depend on the batch size. The last batch is filled with other samples.

    Args:
        loss: A loss that compares images with texts and has log-normalizers. It has its trained state, and is on ``device``.
        image, text: Unit embeddings ``(n, d)`` of the full training set, as tensors or arrays, copied to ``device`` in parts.
        logit_scale: The model's ``1/τ``.
        batch_size: The run's global batch size ``B``.
        index: Positions ``(n,)`` of the samples in the data set, if the loss needs them. None (default) means ``0 .. n−1``.
        anchors: Maximum number of anchors.
        seed: Seed for sampling anchors.

    Raises:
        ValueError: The loss has no normalizers, embeddings are not finite or not of unit norm, or there are fewer samples
            than in a batch.
    """
    refuse_without_normalizers(loss)
    image, text = _pairs(image, text)
    scale = torch.as_tensor(logit_scale, dtype=torch.float64, device=device)
    _check_inputs(image, text, batch_size, scale)
    index = torch.arange(len(image)) if index is None else torch.as_tensor(index)
    total = min(anchors, len(image))
    order = torch.randperm(len(image), generator=torch.Generator().manual_seed(seed))
    exact_of = _exact_for(loss, batch_size)
    alpha, minibatch, tau = [], [], []
    for first in range(0, total, batch_size):
        rows = order[torch.arange(first, first + batch_size) % len(order)]
        count = min(batch_size, total - first)
        batch = (image[rows].to(device), text[rows].to(device), scale, index[rows].to(device))
        alpha.append(torch.stack(loss.log_normalizers(*batch))[:, :count])
        tau.append(anchor_temperatures(loss, *batch)[:, :count])
        own = torch.arange(count, device=device)
        minibatch.append(exact_of(*batch[:2], own, tau[-1]))
    all_tau = torch.cat(tau, dim=1)
    exact = exact_of(image, text, order[:total].to(device), all_tau)
    return EstimationError(
        estimator=Error.of(torch.cat(alpha, dim=1), exact) if _has_estimator(loss) else None,
        minibatch=Error.of(torch.cat(minibatch, dim=1), exact),
        anchors=total,
        samples=len(image),
        batch_size=batch_size,
        temperature=all_tau.median().item(),
    )


def _exact_for(loss: ContrastiveLoss, batch_size: int) -> Callable[..., Tensor]:
    """Return :func:`exact_log_normalizers` for the quantity that a loss estimates with batches of a size."""
    return partial(
        exact_log_normalizers,
        # OpenCLIP's losses have no ε.
        eps=loss.objective.eps if isinstance(loss, GlobalContrastiveLoss) else 0.0,
        include_positive=batch_size if loss.normalizers_include_positive else None,
    )


def _has_estimator(loss: ContrastiveLoss) -> bool:
    # OpenCLIP's losses only have the mini-batch estimate. Other estimands are not the quantity that is computed exactly.
    return isinstance(loss, GlobalContrastiveLoss) and loss.objective.estimand in (NEGATIVES_MEAN, PARTITION_MEAN)


def _check_inputs(image: Tensor, text: Tensor, batch_size: int, scale: Tensor) -> None:
    """Raise ValueError if an embedding is not finite or not of unit norm, or if another input of `measure` is out of range."""
    if batch_size < 2 or batch_size > len(image):
        raise ValueError(f"batch_size={batch_size}: expected from 2 to the number of samples, {len(image)}")
    if not 0 < scale < math.inf:
        raise ValueError(f"logit_scale={scale.item():g}: expected 1/temperature. Pass model.logit_scale.exp()")
    broken = sum(int((~torch.isfinite(side).all(dim=1)).sum()) for side in (image, text))
    if broken:
        raise ValueError(f"{broken} of {2 * len(image)} embeddings are not finite: use an earlier checkpoint")
    lengths = torch.cat([torch.linalg.vector_norm(side, dim=1).double() for side in (image, text)])
    if (lengths - 1).abs().max() > _TOLERANCE:
        raise ValueError(
            f"image and text: expected rows of unit norm, found norms from {lengths.min():.4g} to {lengths.max():.4g}. Pass "
            "torch.nn.functional.normalize(features, dim=-1)"
        )


def refuse_without_normalizers(loss: ContrastiveLoss) -> None:
    """Raise ValueError if a loss has no log-normalizers over all images and texts, or if it is steered."""
    if not isinstance(loss, GlobalContrastiveLoss | OpenClipLoss) or loss.views > 1:
        raise ValueError(
            f"{type(loss).__name__} has no log-normalizers of images against texts: expected openclip or a loss with a "
            "normalizer and a temperature scheme"
        )
    if loss.steers:
        raise ValueError(
            "a loss with steer=True is not supported, because the normalizers depend on the reference model"
        )
    if loss.needs_positives or getattr(loss, "mask_margin", None) is not None:
        option = "equal_captions=mask or positive" if loss.needs_positives else "mask_margin"
        raise ValueError(f"a loss with {option} is not supported, because its normalizers exclude some samples")


def anchor_temperatures(
    loss: ContrastiveLoss,
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    index: Tensor,
    reference: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the temperatures ``(2, B)`` of a batch's anchors. If the loss sets no temperatures, use the model's."""
    if not isinstance(loss, GlobalContrastiveLoss):
        return (1 / scale).expand(2, len(image))
    return loss.anchor_temperatures(image, text, scale, index, reference)


def table(title: str, result: EstimationError) -> str:
    rows = {title: result.estimator, "mini-batch": result.minibatch}
    width, batch = max(map(len, rows)), result.minibatch
    lines = [f"{'estimate':<{width}}  {'error':>9}  {'images':>9}  {'texts':>9}  {'bias':>9}"]
    for name, error in rows.items():
        if error is not None:
            values = (error.mean, error.image, error.text, error.bias)
            lines.append(f"{name:<{width}}" + "".join(f"  {value:9.4f}" for value in values))
    lines.append(
        f"Mean squared error of log-normalizers: {result.anchors:,} images and their texts as anchors, "
        f"{result.samples:,} samples, batches of {result.batch_size:,}\nThe mini-batch estimate is wrong by a median factor "
        f"of {batch.factor:.2g} (90 % of the anchors: {batch.factor_low:.2g} to {batch.factor_high:.2g})"
    )
    return "\n".join(lines)


def checkpoints_of(run: Path, names: str) -> list[str]:
    """Return the names in a comma-separated list. ``all`` means all checkpoints with a ``.state`` folder, oldest first."""
    if names != "all":
        return names.split(",")
    found = [path for path in (run / "checkpoints").glob("epoch_*.pt") if path.with_suffix(".state").is_dir()]
    if not found:
        raise UsageError(f"no checkpoint of {run} has a .state folder: train with --save-frequency")
    # epoch_latest.pt, whose name has no number, is the newest.
    found.sort(key=lambda path: [float(number) for number in re.findall(r"\d+", path.stem)] or [math.inf])
    return [path.name for path in found]


def plot(results: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Draw the errors of each run's loss and of the run's mini-batch estimate over the number of samples seen."""
    from openclip_ext.evaluation.report.curves import draw
    from openclip_ext.pages.charts import Chart, Curve

    runs = list(dict.fromkeys(result["run"] for result in results))
    charts = []
    for kind, title in (("estimator", "the loss's log-normalizers"), ("minibatch", "log-normalizers of mini-batches")):
        known = [result for result in results if result[kind] is not None]
        curves = []
        for color, run in enumerate(runs):
            points = [(row["samples_seen"], row[kind]["mean"]) for row in known if row["run"] == run]
            curves += [Curve(Path(run).name, points, color)] if points else []
        if curves:
            charts.append(Chart(f"squared error of {title}", curves, from_zero=True))
    draw(charts, output)


def main(argv: list[str]) -> None:
    from openclip_ext.diagnostics.finished_run import add_run_arguments, embed_training_set, load_run

    description = "Measure the error of a run's log-normalizers, compared with exact values over the full training set."
    parser = command_line.Parser(prog="openclip-ext estimation-error", description=description)
    add_run_arguments(parser, several=True)
    count_help = "number of samples whose log-normalizers are measured (default: %(default)s)"
    parser.add_argument("--anchors", type=command_line.count, default=DEFAULT_ANCHORS, help=count_help)
    parser.add_argument(
        "--json",
        type=output_path,
        metavar="FILE",
        help="write the result as JSON; for several checkpoints, a list of results",
    )
    parser.add_argument("--plot", type=output_path, metavar="FILE", help="draw the errors over the samples seen")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling anchors (default: %(default)s)")
    args = parser.parse_args(argv)
    names = [(folder, name) for folder in args.run for name in checkpoints_of(folder, args.checkpoint)]
    results: list[dict[str, Any]] = []
    for folder, name in names:
        reading = {"device": args.device, "batch_size": args.batch_size, "workers": args.workers}
        run = load_run(folder, name, args.train_data, **reading)
        refuse_without_normalizers(run.loss)
        if read_config(folder)["flags"]["single_source_batches"]:
            raise UsageError(
                f"{folder} was trained with --single-source-batches: expected a run with normalizers over all samples"
            )
        result = measure(
            run.loss,
            **vars(embed_training_set(run)),
            batch_size=run.global_batch,
            anchors=args.anchors,
            seed=args.seed,
            device=args.device,
        )
        if len(names) > 1:
            print(f"\n{folder}, {run.checkpoint.name}")
        print(table(run.loss_name, result))
        if run.source.num_samples > result.samples:
            print(f"{run.source.num_samples - result.samples:,} samples are bad or excluded by the manifest")
        about = {"run": str(run.folder), "checkpoint": run.checkpoint.name, "loss": run.loss_name, "step": run.step}
        results.append(about | {"samples_seen": run.samples_seen} | asdict(result))
    if args.json:
        write_text(args.json, json_lines.dumps(results if len(results) > 1 else results[0], indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)
        print(args.plot)


if __name__ == "__main__":
    command_line.run(main)
