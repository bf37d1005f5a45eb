"""Lightning's own loop, checkpoints and signal handlers; it goes on from its last checkpoint."""

import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from hpc_trainer import log_metrics

STEPS = int(sys.argv[1])


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        (inputs,) = batch
        return (self.layer(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Tell(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        time.sleep(0.02)
        log_metrics(trainer.global_step, loss=outputs["loss"], num_steps=STEPS)


lightning.seed_everything(0)
folder = Path(os.environ["HPC_TRAINER_CHECKPOINTS"])
last = folder / "last.ckpt"
print(f"begins from {last.name if last.exists() else 'nothing'}")
inputs = torch.utils.data.TensorDataset(torch.randn(64, 4))
trainer = lightning.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Tell(), ModelCheckpoint(folder, every_n_train_steps=10, save_last=True, save_top_k=0)],
)  # fmt: skip
loader = torch.utils.data.DataLoader(inputs, batch_size=8)
trainer.fit(Line(), loader, ckpt_path=str(last) if last.exists() else None)
