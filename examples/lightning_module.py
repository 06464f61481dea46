"""Train a CLIP model from OpenCLIP with NeuCLIP's loss in PyTorch Lightning.

python examples/lightning_module.py [--devices 2] [--resume CHECKPOINT]
"""

import argparse

import lightning
import torch
from demo_pairs import BATCH, Shapes, create_model, print_recall
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import openclip_ext
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data import with_index
from openclip_ext.integrations.lightning import ContrastiveModule


class DemoModule(ContrastiveModule):
    def __init__(self, model: nn.Module, train: Dataset) -> None:
        super().__init__(model, self.create_loss)
        self.train_set = train

    def create_loss(self) -> ContrastiveLoss:
        return openclip_ext.create_loss("neuclip", embed_dim=64, num_samples=len(self.train_set), prototypes=1024)

    def train_dataloader(self) -> DataLoader:
        # Lightning passes the epoch to a DistributedSampler, so a resumed run has the order of an uninterrupted run.
        processes, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.train_set, processes, rank, drop_last=True)
        return DataLoader(self.train_set, BATCH, sampler=sampler, drop_last=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.model_loss.separate_rate(optimizer)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [group["lr"] for group in optimizer.param_groups], steps
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1, help="processes, started by Lightning")
    parser.add_argument("--output", default="demo/lightning")
    parser.add_argument("--resume", default=None, metavar="CHECKPOINT")
    args = parser.parse_args()

    train, test = with_index(Shapes("train", args.samples)), Shapes("test", 500)
    model, *_ = create_model()
    trainer = lightning.Trainer(
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=args.epochs,
        default_root_dir=args.output,
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(DemoModule(model, train), ckpt_path=args.resume)
    model.eval()
    with torch.no_grad():
        outputs = model(test.images, test.texts)
    if trainer.is_global_zero:
        print_recall(outputs["image_features"], outputs["text_features"])


if __name__ == "__main__":
    main()
