"""Train a small BERT with Hugging Face's ``Trainer``: accumulation, evaluation, a checkpoint, and on from there.

    torchrun --nproc-per-node 2 train_with_trainer.py FOLDER [--instrumented]

Each rank leaves its final parameters in FOLDER.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

WORDS = 1000
SENTENCE = 16
ACCUMULATED = 2
STEPS = 4


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of random words; the class is whether the first word is a late one."""
    words = torch.randint(WORDS, (count, SENTENCE), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": sentence, "labels": (sentence[0] > WORDS // 2).long()} for sentence in words]


def train(folder: Path, steps: int, *, resume: bool) -> BertForSequenceClassification:
    set_seed(1)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=ACCUMULATED,
            eval_strategy="steps",
            eval_steps=STEPS // 2,
            save_steps=STEPS,
            ddp_bucket_cap_mb=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=sentences(8 * ACCUMULATED * STEPS, seed=2),
        eval_dataset=sentences(16, seed=3),
    )
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == steps
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instrumented", action="store_true", help="use instrumented_ddp in place of torch's class")
    arguments = parser.parse_args()
    if arguments.instrumented:
        import instrumented_ddp

        torch.nn.parallel.DistributedDataParallel = instrumented_ddp.DistributedDataParallel

    train(arguments.folder, STEPS, resume=False)
    model = train(arguments.folder, 2 * STEPS, resume=True)
    torch.save(model.state_dict(), arguments.folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()  # else a thread of gloo's may abort the process (pytorch #179291)


if __name__ == "__main__":
    main()
