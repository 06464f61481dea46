"""For a wrong command line, the program exits with status 2, and prints one line with the mistake and its fix."""

import json
import tarfile
from contextlib import nullcontext

import open_clip
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from openclip_ext import create_loss
from openclip_ext.cli.words import refuse_foreign_words
from openclip_ext.training.checks import check_combination, doubtful_settings, other_batch
from openclip_ext.training.config import ModelConfig
from openclip_ext.training.flags import parse
from openclip_ext.training.main import cli, main
from openclip_ext.training.plan import resolve
from tests.data.shards import image_bytes
from tests.training.commands import plan_of
from tests.training.runs import metrics_of, run, small_command
from tests.training.test_models import CAPTIONER, TIMM, model_folder

WORKS = "--model demo-vit --precision fp32 --device cpu --logs none --dataset-type synthetic --train-num-samples 64"

TRAINS = "--model demo-vit --precision fp32 --device cpu --name run --train-data x.tar --val-data y.tar --batch-size 8"

# Files of the folder in which the program starts.
FILES = {
    "unitclip.py": b"",
    "empty.pt": b"",
    "text.pt": b"hello, this is a text",
    "x.csv": b"filepath\ttitle\n0.png\ta\n",
    "two.csv": b"image,caption,text\n0.png,a,b\n",
    "urls.csv": b"path,title\nhttps://x.org/0.png,a\n",
    "latin.csv": "filepath\ttitle\n0.png\tcaf\u00e9".encode("latin-1"),
}

# Pairs of wrong flags and a part of the expected error.
MISTAKES = [
    ("--gama 0.5", "unrecognized arguments: --gama 0.5; did you mean --gamma?"),
    ("-loss neuclip", "did you mean --loss?"),
    ("--los neuclip", "--los: abbreviations are not accepted; write it out: --loss"),
    ("--batch-size 0", "--batch-size 0: expected an integer >= 1"),
    ("--epochs -1", "to evaluate only, remove --train-data"),
    ("--lr 0", "--lr 0.0: expected a number > 0; to evaluate only, remove --train-data"),
    ("--beta2 1", "--beta2 1.0: expected a number >= 0, below 1"),
    ("--opt sgd", "--opt sgd: expected adamw, lamb or timm/NAME"),
    ("--opt timm/lamb", "--opt timm/lamb needs --lr"),
    ("--opt timm/lamb --lr 1 --beta1 0.9", "both --beta1 and --beta2"),
    ("--lookahead-steps 5", "--lookahead-steps needs --opt timm/lookahead_NAME"),
    ("--lr-scheduler linear", "--lr-scheduler linear: expected one of cosine, const, const-cooldown"),
    ("--model vit-b-32", "did you mean ViT-B-32?"),
    ("--model RN50 --pretrained cc13m", "a tag of RN50; did you mean cc12m?; tags of RN50: openai"),
    ("--caption-template {c}", "--caption-template '{c}': expected {} for the name of the class"),
    ("--force-image-size 0", "--force-image-size 0: expected one positive number, or the height and the width"),
    ("--image-mean 1 2", "--image-mean [1.0, 2.0]: expected three numbers"),
    ("--aug-cfg scale", "--aug-cfg: expected NAME=VALUE"),
    ("--aug-cfg foo=3", "--aug-cfg: got an unexpected keyword argument 'foo'"),
    ("--lock-text-unlocked-layers 3", "--lock-text-unlocked-layers needs --lock-text"),
    ("--lock-image-freeze-bn-stats", "--lock-image-freeze-bn-stats needs --lock-image"),
    ("--device gpu", "--device gpu: expected cpu, cuda or cuda:N"),
    ("--device cuda:0", "--device cuda:0: PyTorch finds 0 GPUs on this machine; use cpu"),
    ("--opt timm/sgdd --lr 1 --opt-kwargs a=1", "--opt timm/sgdd --opt-kwargs a=1: "),
    ("--opt-kwargs amsgrad", "expected NAME=VALUE"),
    ("--opt-kwargs lr=1", "another flag or the program sets lr"),
    ("--opt-kwargs amsgrat=True", "--opt adamw --opt-kwargs amsgrat=True: "),
    ("--loss neucilp", "did you mean neuclip?"),
    ("--loss no.module:METHOD", "No module named 'no'"),
    ("--loss .relative:METHOD", "such as relative:METHOD"),
    ("--loss neuclip --gamma 0.5", "only with --normalizer moving-average"),
    ("--loss openclip --temperature-scheme global --rho 5", "only with --temperature-scheme solved"),
    ("--loss openclip --temperature 0.05", "only with --temperature-scheme constant"),
    ("--loss siglip --gamma 0.5", "--gamma: not used by the loss 'siglip', which takes"),
    ("--loss neuclip --loss-option prototyps=5", "no option 'prototyps'; did you mean prototypes?"),
    ("--loss neuclip --loss-option prototypes", "prototypes: expected NAME=VALUE"),
    ("--loss neuclip --loss-option simultaneous=perhaps", "simultaneous='perhaps': expected True or False"),
    ("--loss neuclip --temperature 14", "--temperature 14: expected a temperature from 0.03 to 1"),
    ("--loss neuclip --temperature-min 0.5 --temperature-max 0.2", "is larger than --temperature-max 0.2"),
    ("--loss neuclip --siglip", "--siglip and --loss neuclip contradict each other"),
    ("--recipe cc3", "unknown recipe 'cc3'; did you mean cc3m"),
    ("--recipe dfn14m --loss amorlip", "no published settings for the loss 'amorlip'"),
    ("--loss neuclip --loss-option leave_own_out=true", "--loss-option leave_own_out: not used by the loss 'neuclip'"),
    ("--dataset-type auto --train-data x.txt", "--dataset-type csv if it has another ending"),
    ("--dataset-type auto --train-data folder", "folder is a folder without class folders"),
    ("--dataset-type auto --train-data user/pairs.parquet", "user/pairs.parquet cannot be read as a table"),
    ("--dataset-type webdataset --train-data /no/{0..3}.tar", "none of the 4 files exists, the first is /no/0.tar"),
    ("--dataset-type webdataset --train-data data/{00..10", "Unbalanced braces"),
    ("--dataset-type webdataset --train-data x.tar --manifest no.json", "--manifest no.json not found"),
    ("--dataset-type webdataset --train-data x.tar --caption-key meta:a", "the key 'meta:a' is not understood"),
    ("--dataset-type webdataset --train-data x.tar --image-key json:a", "the key 'json:a' is not understood"),
    ("--resume latest --logs logs", "--resume latest needs --name"),
    ("--resume latest", "--resume latest needs a run folder: remove --logs none"),
    ("--resume s3://b/epoch_1.pt", "s3://b/epoch_1.pt is a URL"),
    ("--resume no/epoch_1.pt", "no/epoch_1.pt does not exist"),
    ("--resume .", "checkpoint . is a folder: expected a file, such as"),
    ("--name=", "--name=: the value is empty: remove the flag"),
    ("--logs=~/runs", "~/runs: the shell did not replace ~. Write $HOME/runs"),
    ("--report-to tensorbord", "--report-to tensorbord: expected one or more of wandb, tensorboard, all"),
    ("--remote-sync s3://x", "--remote-sync needs a run folder: remove --logs none"),
    ("--val-data /no/{0..3}.tar --dataset-type auto", "4 of 4 files not found, the first is /no/0.tar"),
    ("--imagenet-val /no", "--imagenet-val /no is not a folder"),
    ("--horovod", "torchrun"),
    ("--dataset-type auto", "nothing to do: give --train-data"),
    ("--trace --train-data x.tar --dataset-type webdataset", "--trace is for evaluation only"),
    ("--distill-model RN50", "--reference FOLDER --distill WEIGHT"),
    ("demo/0.tar", "give the data with --train-data"),
    ("--lr-scheduler const-cooldown", "--epochs-cooldown and --lr-scheduler const-cooldown need each other"),
    ("--lr-min 1e-3", "--lr-min 0.001: expected at most --lr 0.0005"),
    ("--save-every-steps 5", "--save-every-steps needs a run folder"),
    ("--rho 3 --hard-share 0.5 --loss fastclip", "argument --hard-share: not allowed with argument --rho"),
    ("--loss sogclr --loss-option gamma=0.3 --gamma 0.9", "--gamma and --loss-option gamma set the same option"),
    ("--val-data val.tar", "reads no files: remove --val-data val.tar"),
    ("--hard-negative-key txt", "--hard-negative-key needs captions, but"),
    ("--fsdp --ddp-static-graph", "--ddp-static-graph does not work with --fsdp"),
    ("--ddp-static-graph --batch-size 8 --global-batch 16", "--ddp-static-graph does not work with --accum-freq"),
    ("--lora-rank 2 --fsdp", "--fsdp does not work with --lora-rank"),
    ("--lora-rank 2 --lora-targets text --lock-text", "--lock-text does not work with --lora-rank"),
    ("--loss sogclr --views 2 --rho 5", "--rho: not used by the loss 'sogclr with --views 2'"),
    ("\u2013\u2013loss neuclip", "this word starts with a typographic dash"),
    ("--name \u2018first\u2019", "this word has typographic quotes"),
    ("--Batch_Size 8", "--Batch_Size: unknown flag; did you mean --batch-size?"),
    ("--gpus 2", "torchrun --nproc-per-node"),
    ("--world_size=2", "torchrun --nproc-per-node"),
    ("--learning-rate 1e-3", "--lr"),
    ("--data x.tar", "--train-data"),
    ("--wandb", "--report-to wandb"),
    ("--loss clip", "did you mean openclip?"),
    ("--loss ./sharedclip.py:METHOD", "such as sharedclip:METHOD"),
    ("-help", "-help: --help lists the flags"),
    ("--train-data d/0.tar d/1.tar d/2.tar", "d/1.tar and 1 more words belong to no flag: --train-data takes one word"),
    ("--resume last --name x", "did you mean --resume latest?"),
    ("--loss sharedclip.py", "or my.module:METHOD"),
    ("--loss openclip_ext.losses.neuclip:NeuClip", "expected a Method object, found None"),
    ("--seed 4294967296", "--seed 4294967296: expected an integer >= 0, at most 4294967295"),
    ("--lr 5", "--lr 5.0 is too high for AdamW: expected at most 1"),
    ("--pretrained folder", "--pretrained folder is a folder: expected a file of weights"),
    ("--name ../up", "--name ../up is a path: expected a name"),
    ("--name .", "--name . is a path: expected a name"),
    ("--logs s3://b/runs", "is a URL: expected a local path. Use a local --logs; --remote-sync s3://b/runs"),
    ("--recipe cc3m --loss sogclr --views 2", "is for images with texts, not for --views 2"),
    ("--loss queueclip --distill 1", "--distill: needs --reference FOLDER"),
    ("--loss queueclip --reference store --no-steer", "--no-steer: --reference then has no effect without --distill"),
    ("--loss unitclip", "--loss unitclip:METHOD"),
    ("--loss unitclip.py", "--loss unitclip:METHOD"),
    ("--pretrained run", "--pretrained run/checkpoints/epoch_2.pt"),
    ("--train-data photo --dataset-type auto", "photo is not a local file or folder"),
    ("--train-data two.csv --dataset-type auto", "--csv-separator ,"),
    ("--train-data x.csv --dataset-type auto --val-data two.csv", "--csv-separator ,"),
    ("--train-data urls.csv --dataset-type auto", "img2dataset"),
    ("--train-data latin.csv --dataset-type auto", "latin.csv is not UTF-8 text"),
    ("--config finetune", "--config finetune starts from a pretrained model: give --pretrained"),
]


# Pairs of flags that are legal, but probably a mistake, and a part of the expected warning. An empty text means no warning.
DOUBTFUL = [
    ("--lr 1e-2 --pretrained x.pt", "--lr 0.01"),
    ("--lr 1e-3 --pretrained x.pt", ""),
    ("--lr 1e-2", ""),
    ("--lr 1e-2 --pretrained x.pt --lora-rank 2", ""),
    ("--lock-image", "--lock-image freezes random weights"),
    ("--lock-image --pretrained-image", ""),
    ("--lock-text --pretrained-image", "--lock-text freezes random weights"),
    ("--lock-text --pretrained x.pt --lock-image", ""),
    ("--model roberta-ViT-B-32 --lock-text", ""),
    ("--val-frequency 0", "--val-frequency is 0"),
    ("--zeroshot-frequency 0", ""),
    ("--zeroshot-frequency 0 --imagenet-v2 tests", "--zeroshot-frequency is 0"),
    ("--precision pure_bf16 --lr 1e-6", "amp_bf16"),
    ("--val-data x.tar", "--val-data is the training data"),
    ("--keep-data x.tar", "--keep-data is the training data"),
    ("--keep-data y.tar --val-data y.tar", "--val-data is --keep-data"),
    ("--keep-data y.tar --val-data z.tar", ""),
    ("--precision bf16 --lr 1e-4", "amp_bf16"),
    ("--precision pure_bf16 --lr 5e-4", ""),
    ("--precision pure_bf16 --lr 1e-6 --lr-text 1e-3", ""),
]


@pytest.mark.parametrize(("flags", "message"), DOUBTFUL)
def test_a_doubtful_setting_is_a_warning(flags, message):
    found = [*doubtful_settings(resolve(parse([*TRAINS.split(), *flags.split()])))]
    assert len(found) == bool(message) and message in "".join(found)


@pytest.mark.parametrize(
    ("metric", "flags", "expected"),
    [
        ("R@1", "", "image_to_text_R@1"),
        ("image_to_text_R@1", "--val-frequency 0 --imagenet-val tests", "imagenet-zeroshot-val-top1"),
        ("val_generative_loss", "", "clip_val_loss"),
        ("clip_val_loss", "", None),
        ("imagenetv2-zeroshot-val-top5", "--imagenet-v2 tests", None),
        ("datacomp/average/VTAB (13)", "--eval-suite full --eval-data-dir tests", None),
    ],
)
def test_the_metric_of_the_best_model_is_checked_at_the_start(metric, flags, expected):
    config = resolve(parse([*TRAINS.split(), "--keep-best", metric, *flags.split()]))
    with nullcontext() if expected is None else pytest.raises(ValueError, match=expected):
        check_combination(config, create_loss("openclip"), 1, is_captioner=False)


def errors_of(flags, monkeypatch, capsys):
    """Run the program with wrong flags; return what it printed to stderr."""
    monkeypatch.setattr("sys.argv", ["train", *WORKS.split(), *flags])
    with pytest.raises(SystemExit) as stopped:
        cli()
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Change to a folder with files that users may give by mistake."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open(tmp_path / "pairs.tar", "w") as tar:
        tar.add(tmp_path / "x.csv", "x.csv")
    weights = {"epoch": 1, "name": "x", "state_dict": {"visual.conv.weight": torch.zeros(2)}, "optimizer": {}}
    lightning = {"epoch": 1, "state_dict": {}, "optimizer_states": [], "pytorch-lightning_version": "2.6"}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    of_run = {f"run/checkpoints/epoch_{epoch}.pt": weights | {"epoch": epoch} for epoch in (1, 2)}
    for name, saved in ({"other.pt": weights, "lightning.ckpt": lightning} | of_run).items():
        torch.save(saved, tmp_path / name)


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_status_2(flags, message, desk, monkeypatch, capsys):
    monkeypatch.setattr(ModelConfig, "create", lambda *_: pytest.fail("the model was built"))
    if "table" in message:
        pytest.importorskip("datasets")
    told = errors_of(flags.split(), monkeypatch, capsys).strip()
    assert told.splitlines()[-1].startswith("error: ") and message in told.splitlines()[-1]
    assert "usage:" not in told


@pytest.mark.parametrize("number", [{}, {"WORLD_SIZE": "1", "SLURM_NTASKS": "4"}])
def test_a_single_process_tells_its_mistake_in_each_task(number, monkeypatch, capsys):
    for name, value in (number | {"SLURM_PROCID": "2"}).items():
        monkeypatch.setenv(name, value)
    assert "error: --seed" in errors_of(["--seed", "-1"], monkeypatch, capsys)


def test_help_is_a_flag():
    with pytest.raises(ValueError, match="help: --help lists the flags"):
        refuse_foreign_words(["help"], [])
    refuse_foreign_words(["--name", "help"], ["--name"])


@pytest.mark.parametrize("word", ["--gpus", "--world-sizes", "--gpu-ids"])
def test_a_word_that_is_not_similar_is_not_suggested(word, monkeypatch, capsys):
    assert "did you mean" not in errors_of([word, "2"], monkeypatch, capsys)


@pytest.mark.parametrize("notes", ["\u201cfirst\u201d try", ""])
def test_notes_may_contain_anything(notes):
    assert parse([*WORKS.split(), "--wandb-notes", notes]).flags["wandb_notes"] == notes


def test_a_text_is_no_command_line():
    with pytest.raises(ValueError, match="list of words"):
        main("--loss queueclip")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pretrained other.pt", "other.pt"),
        ("--resume other.pt", "other.pt"),
        ("--resume lightning.ckpt", "Trainer.fit(..., ckpt_path=...)"),
        *((f"--pretrained {name}.pt", f"{name}.pt is not a checkpoint of --model") for name in ("empty", "text")),
        ("--pretrained pairs.tar", "expected only tensors and plain types"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(flags, message, desk, monkeypatch, capsys):
    told = errors_of(flags.split(), monkeypatch, capsys)
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert message in line and len(line) < 400 and not line.endswith(": ")


@pytest.mark.parametrize("name", ["get_tokenizer", "create_model_and_transforms"])
def test_a_file_that_cannot_be_downloaded_is_one_line(name, monkeypatch, capsys):
    def offline(*_, **__):
        raise OSError("many\nlines") from LocalEntryNotFoundError("no network")

    monkeypatch.setattr(open_clip, "get_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(open_clip, name, offline)
    told = errors_of(["--model", "ViT-B-16-SigLIP"], monkeypatch, capsys).splitlines()[-1]
    assert "get_tokenizer('ViT-B-16-SigLIP')" in told and ("tokenizer timm/ViT-B-16-SigLIP" in told) == ("get" in name)


# --- with data --------------------------------------------------------------------------------------------------------

RESNET = "--model demo-resnet --force-patch-dropout 0"
LOCKED = "--lock-image --lock-text --lock-text-freeze-layer-norm --temperature-scheme constant"
FEATURES = "--image-features store --force-patch-dropout 0"
ONE_PAIR = "--batch-size 1 --epochs 1 --train-num-samples 4 --force-patch-dropout 0"

# Triples of a loss, wrong flags, and parts of the error. The first table is checked before the model is built.
BEFORE_THE_MODEL = [
    ("openclip", "--keep-data nothing.tar", "--keep-data & nothing.tar"),
    ("openclip", "--keep-data nothing", "--keep-data & nothing"),
    ("openclip", "--keep-data few.jsonl", "--keep-data & 200"),
    ("openclip", "--keep-data unusable.jsonl", "--keep-data & none of the first"),
    ("openclip", "--val-classes nothing.csv", "--val-classes & nothing.csv"),
    ("openclip", "--val-classes nothing", "--val-classes & nothing & images per class"),
    ("openclip", "--keep-tasks nothing", "--keep-tasks & nothing"),
    ("openclip", "--keep-tasks a/val::b/val", "--keep-tasks & a/val & b/val"),
    ("openclip", "--train-data a.tar::b.csv", "'::' needs webdataset shards & csv"),
    ("openclip", "--keep-share 0.5", "--keep-share & --keep-data"),
    ("openclip", "--keep-at-least 0.5", "--keep-at-least & --keep-data"),
    ("queueclip", "--keep-data SHARDS --reference store", "--keep-data & --no-steer"),
    ("openclip", "--keep-data SHARDS --keep-share 1", "--keep-share"),
    ("openclip", "--keep-data SHARDS --batch-size 1", "--keep-data & --batch-size"),
    ("openclip", "--keep-data SHARDS --single-source-batches", "--single-source-batches"),
    ("openclip", "--keep-data SHARDS --hard-negative-key txt", "--hard-negative-key"),
    ("openclip", "--config finetun", "unknown --config & finetune & config.json"),
    ("openclip", "--reference start --distill 0.5", "--reference & --pretrained"),
    ("openclip", "--config finetune --pretrained x.pt --recipe cc3m", "--recipe"),
    ("openclip", "--warmup 1.5", "--warmup"),
    ("siglip", "--equal-captions mask", "--equal-captions: not used by the loss 'siglip'"),
    ("openclip", FEATURES, "--lock-image"),
    ("openclip", f"{FEATURES} --lock-image --lock-image-unlocked-groups 1", "--lock-image-unlocked-groups"),
    ("openclip", f"{FEATURES} --lock-image --caption-aware-flip", "--caption-aware-flip"),
    ("sogclr", f"{FEATURES} --lock-image", "--views"),
    ("openclip", f"{FEATURES} --lock-image --dry-run", "--dry-run"),
]
WITH_THE_MODEL = [
    ("openclip", "--eval-suite quick --eval-data-dir /nothing", "nothing"),
    ("fastclip", "--dataset-resampled", "--dataset-resampled: --loss fastclip needs each sample once"),
    ("openclip", "--keep-best top1", "--keep-best needs --logs, and an evaluation"),
    ("openclip", "--torchscript", "--torchscript cannot train"),
    ("openclip", "--lock-text", "--lock-text needs --lock-text-freeze-layer-norm"),
    ("openclip", f"{RESNET} --lock-image --lock-image-unlocked-groups 99", "99 is not possible for this model"),
    ("queueclip", f"{RESNET} {LOCKED}", "nothing is left to train"),
    ("cliplite", "--model-ema-decay 0.9", "would not average"),
    ("openclip", "--lock-image --lock-image-unlocked-groups 100", "100 leaves nothing of the image tower locked"),
    ("openclip", f"{LOCKED} --lock-text-unlocked-layers 100 --temperature-scheme global", "text tower locked"),
    ("openclip", "--force-image-size 3", "--force-image-size: the images are smaller than a patch of"),
    ("openclip", "--model NO_PATCHES --force-patch-dropout 0.5", "--force-patch-dropout: & has no patches"),
    (
        "openclip",
        "--model NO_PATCHES --force-patch-dropout 0 --lock-image --lock-image-unlocked-groups 99",
        "groups 99",
    ),
    ("neuclip", "--model CAPTIONER --force-patch-dropout 0", "would not train the captions of"),
    *((loss, ONE_PAIR, "--batch-size & --accum-freq") for loss in ("openclip", "siglip", "queueclip")),
    ("queueclip", f"{ONE_PAIR} --hard-negative-key txt", "--batch-size & --accum-freq"),
]


@pytest.fixture(scope="module")
def places(shards, tmp_path_factory):
    """Return what the words in capitals stand for."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "captioner.json").write_text(json.dumps(CAPTIONER))
    open_clip.add_model_config(folder)
    no_patches = model_folder(folder / "folder", {**TIMM, "timm_model_name": "test_resnet"})
    return {"SHARDS": shards, "CAPTIONER": "captioner", "NO_PATCHES": no_patches}


def given(flags, places):
    return [places.get(word, word) for word in flags.split()]


@pytest.mark.parametrize(("loss", "flags", "said"), [*BEFORE_THE_MODEL, *WITH_THE_MODEL])
def test_what_the_data_the_model_or_the_loss_cannot_do_is_told(
    shards, places, tmp_path, monkeypatch, loss, flags, said
):
    monkeypatch.chdir(tmp_path)
    if ".jsonl" in flags:
        pytest.importorskip("datasets")
    for name, count in (("few", 150), ("unusable", 300)):
        lines = [json.dumps({"path": f"{row}.png", "caption": f"sample {row}"}) for row in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    if "few" in flags:
        (tmp_path / "0.png").write_bytes(image_bytes(0))
    for folder in ("a", "b"):
        (tmp_path / folder / "val").mkdir(parents=True)
    if (loss, flags, said) in BEFORE_THE_MODEL:
        monkeypatch.setattr(ModelConfig, "create", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(ValueError) as error:
        run(small_command(shards, tmp_path / "logs", "run", loss, *given(flags, places)))
    assert all(part in str(error.value) for part in said.split(" & "))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("flags", ["--accum-freq 2", "--model CAPTIONER", "--hard-negative-key txt"])
def test_a_batch_of_one_pair_trains_what_learns_from_it(shards, places, tmp_path, flags):
    """A captioner's captions and hard negatives also train with one pair."""
    assert run(small_command(shards, tmp_path, "run", "openclip", *given(f"{ONE_PAIR} {flags}", places))) == 0
    assert metrics_of(tmp_path / "run")[0]["loss"] > 0


@pytest.mark.parametrize("package", ["wandb", "peft"])
def test_a_package_that_is_missing_is_told(shards, tmp_path, monkeypatch, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = {"wandb": ["--report-to", "wandb"], "peft": ["--lora-rank", "2"]}
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install"):
        run(small_command(shards, tmp_path, "run", "openclip", *flags[package]))


@pytest.mark.parametrize(("batch_size", "told"), [([], True), (["--batch-size", "1024"], False)])
def test_a_recipe_on_fewer_gpus_tells_its_batch(batch_size, told):
    config = plan_of("--recipe", "cc3m", "--loss", "neuclip-paper", *batch_size)
    message = other_batch(config, config.loading.batch_size, 1) or ""
    assert ("for a global batch of 1,024, but this run has 128: give --batch-size 1024" in message) == told


@pytest.mark.parametrize(("flags", "told"), [(["--local-loss"], True), (["--local-loss", "--gather-with-grad"], False)])
def test_hard_negatives_without_a_gradient_are_refused(flags, told):
    config = plan_of("--hard-negative-key", "txt", *flags)
    with pytest.raises(ValueError, match="add --gather-with-grad") if told else nullcontext():
        check_combination(config, create_loss("openclip", **config.loss.options), 2, False)


def test_a_run_logs_doubtful_settings(shards, tmp_path, caplog):
    more = ["--epochs", "1", "--force-patch-dropout", "0", "--fsdp", "--precision", "pure_bf16", "--lr", "1e-6"]
    assert run(small_command(shards, tmp_path, "run", "openclip", *more)) == 0
    assert "--fsdp has no effect" in caplog.text and "amp_bf16" in caplog.text


@pytest.mark.parametrize("mistake", [["--batch-size", "100"], ["--max-bad-fraction", "0", "--image-key", "nope"]])
def test_the_corrected_command_works_after_a_start_that_failed_or_was_killed(shards, tmp_path, mistake):
    right = small_command(shards, tmp_path, "mine", "openclip", "--epochs", "1")
    in_new_folders = small_command(shards, tmp_path / "new" / "runs", "mine", "openclip")
    for argv in (right, in_new_folders):
        with pytest.raises(ValueError, match=r"too few samples|no usable sample, with an image"):
            run([*argv, *mistake])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    for name in ("out.log", ".lock", "params.txt", "config.json"):  # of a start that was killed
        (tmp_path / "mine" / name).touch()
    assert run(right) == 0
