"""A TimmWrapper model of transformers, pruned, and tuned by transformers' Trainer with its original as the teacher.

    pip install "timm-knapsack[examples]"
    python examples/transformers_trainer.py --data IMAGES --model timm/resnet18.a1_in1k --budget 0.5 --output tuned

IMAGES is a folder with ``train`` and ``validation``, and in each a folder for every class (any ``datasets`` image
folder). What comes out is an ordinary timm model, and the same TimmWrapper with it inside.
"""

import argparse

import timm_knapsack as tk  # isort: skip  (before timm)
import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

from timm_knapsack.images.augmentation import Preprocessing, Transform


def batches_of(dataset, transform):
    """Rows of ``image`` and ``label`` as what the model takes."""

    def convert(rows):
        images = [image.convert("RGB") for image in rows["image"]]
        return {"pixel_values": transform.images(images, np.zeros(len(images), np.uint64)), "labels": rows["label"]}

    return dataset.with_transform(convert)


def main(arguments=None, wrapper=None):
    """Run it; ``wrapper`` is a TimmWrapperForImageClassification to use instead of one from the Hub."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="timm/resnet18.a1_in1k")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--output", default="tuned")
    options = parser.parse_args(arguments)

    wrapper = wrapper or AutoModelForImageClassification.from_pretrained(options.model)
    teacher = wrapper.timm_model.eval()
    data = load_dataset("imagefolder", data_dir=options.data)
    transform = Transform(Preprocessing.read(teacher))
    train, validation = (batches_of(data[split], transform) for split in ("train", "validation"))
    loader = torch.utils.data.DataLoader(train, batch_size=options.batch_size)  # batches are dicts, and may be

    student = tk.prune(teacher, loader, budget=tk.Budget(macs=options.budget)).model
    task = tk.InnerDistillationTask(student, teacher)
    task.init_from_data(batch["pixel_values"] for batch, _ in zip(loader, range(8), strict=False))
    settings = TrainingArguments(
        output_dir=f"{options.output}-trainer", num_train_epochs=options.epochs, optim="sgd",
        optim_args="momentum=0.9", learning_rate=options.lr, lr_scheduler_type="cosine", warmup_steps=2,
        per_device_train_batch_size=options.batch_size, per_device_eval_batch_size=options.batch_size,
        eval_strategy="epoch", save_strategy="no", report_to=[], remove_unused_columns=False, label_names=["labels"],
    )  # fmt: skip
    trainer = Trainer(
        task.for_trainer(), settings, train_dataset=train, eval_dataset=validation,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    print(f"accuracy {before['eval_accuracy']:.4f} → {after['eval_accuracy']:.4f}")
    wrapper.timm_model = student.cpu().eval()  # transformers' own model, now with the small network inside
    tk.save_pretrained(student, options.output)
    return wrapper


if __name__ == "__main__":
    main()
