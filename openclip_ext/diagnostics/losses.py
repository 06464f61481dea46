"""List all losses, or describe the given losses: ``openclip-ext losses [NAME ...]``."""

from collections.abc import Iterator

from openclip_ext.cli import command_line
from openclip_ext.losses.options import PARTS, SUMMARIES
from openclip_ext.losses.registry import check_options, find_method, list_losses, run_defaults
from openclip_ext.training.parser import describe_options


def main(argv: list[str]) -> None:
    parser = command_line.Parser(prog="openclip-ext losses", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a loss, or my.module:METHOD (default: list all)")
    names = parser.parse_args(argv).names
    if not names:
        width = max(map(len, list_losses()))
        print("\n".join(f"{name:{width}}  {SUMMARIES.get(name, '')}" for name in list_losses()))
    for name in names:
        print("\n".join(_described(name)))


def _described(name: str) -> Iterator[str]:
    name = find_method(name).name
    options = run_defaults(name, {})
    loss = check_options(name, **options)
    yield f"{name}: {SUMMARIES.get(name, '')}".rstrip(": ")
    parts = [f"{part.replace('_', ' ')} {options[part]}" for part in PARTS if part in options]
    other = " (--normalizer or --temperature-scheme give it parts)" if find_method(name).composed is not None else ""
    yield f"  parts:    {', '.join(parts) or 'none'}{other}"
    yield f"  index:    {'needed for each sample' if loss.needs_index else 'not needed'}"
    replicated, per_sample = loss.state_size()
    networks = ", and prototypes or networks" if replicated > loss.get_extra_state().nbytes else ""
    yield f"  state:    {per_sample // (loss.num_samples or 1)} bytes per sample{networks}"
    yield "  cost:     openclip-ext plan predicts the memory; docs/scale.md reports the time"
    yield f"  trains:   {'the model and projection heads' if loss.model_head() is not None else 'only the model'}"
    yield "  flags that OpenCLIP does not have, with their defaults (the log of a run has those that depend on its length):"
    yield f"\n{describe_options(name)}\n"


if __name__ == "__main__":
    command_line.run(main)
