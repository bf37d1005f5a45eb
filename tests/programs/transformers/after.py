"""A small language model, trained by Hugging Face's Trainer."""

import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hpc_trainer import log_metrics

LR, STEPS, OUT = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        words = (torch.arange(16) * (index + 1)) % 32
        return {"input_ids": words, "labels": words}


class Tell(TrainerCallback):
    def on_log(self, arguments, state, control, logs, **more):
        if "loss" in logs:
            log_metrics(state.global_step, loss=logs["loss"], num_steps=STEPS)


set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    OUT, max_steps=STEPS, learning_rate=LR, per_device_train_batch_size=1, save_steps=10, save_total_limit=2,
    logging_steps=1, report_to=[], use_cpu=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=Words(), callbacks=[Tell()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT))
