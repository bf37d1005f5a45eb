"""Lightning's own loop and checkpoints."""

import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from hpc_trainer import log_metrics

LR, STEPS, OUT = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        (inputs,) = batch
        time.sleep(0.02)
        return (self.layer(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


class Tell(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        log_metrics(trainer.global_step, loss=outputs["loss"], num_steps=STEPS)


lightning.seed_everything(0)
callbacks: list[Callback] = [Tell(), ModelCheckpoint(OUT, every_n_train_steps=10, save_last=True, save_top_k=0)]
trainer = lightning.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=callbacks
)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
last = Path(OUT, "last.ckpt")
trainer.fit(Line(), torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=last if last.exists() else None)
