"""Lightning's own loop and checkpoints."""

import sys
import time

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

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


lightning.seed_everything(0)
callbacks: list[Callback] = [ModelCheckpoint(OUT, every_n_train_steps=10, save_last=True, save_top_k=0)]
trainer = lightning.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=callbacks
)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
trainer.fit(Line(), torch.utils.data.DataLoader(data, batch_size=8))
