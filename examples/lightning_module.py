"""Train a CLIP of OpenCLIP with NeuCLIP's loss in PyTorch Lightning.

python examples/lightning_module.py [--resume CHECKPOINT]
"""

import argparse

import lightning
import torch
from demo_pairs import BATCH, Shapes, create_model, print_recall
from torch.utils.data import DataLoader, DistributedSampler

import openclip_ext
from openclip_ext.data import with_index
from openclip_ext.integrations.lightning import ContrastiveModule


class DemoModule(ContrastiveModule):
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
    parser.add_argument("--output", default="demo/lightning")
    parser.add_argument("--resume", default=None, metavar="CHECKPOINT")
    args = parser.parse_args()

    train, test = with_index(Shapes("train", args.samples)), Shapes("test", 500)
    model, *_ = create_model()
    loss = openclip_ext.create_loss("neuclip", embed_dim=64, num_samples=len(train), prototypes=1024)
    # Lightning tells a DistributedSampler the epoch, also with one process: a resumed run shuffles as if uninterrupted.
    sampler = DistributedSampler(train, num_replicas=1, rank=0, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=args.epochs, default_root_dir=args.output, logger=False, enable_model_summary=False
    )
    loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    trainer.fit(DemoModule(model, loss), loader, ckpt_path=args.resume)
    model.eval()
    with torch.no_grad():
        outputs = model(test.images, test.texts)
    print_recall(outputs["image_features"], outputs["text_features"])


if __name__ == "__main__":
    main()
