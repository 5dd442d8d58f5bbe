"""A pruned network in timm's own train loop, taught by its original: logits and inner maps.

    python examples/timm_train_loop.py --data IMAGES --model resnet50 --budget 0.5 --epochs 10 --output tuned

The loop is that of timm's train.py, with timm's loaders, optimiser, schedule, EMA and checkpoints; the one line that is
not timm's is the task. IMAGES is a folder with ``train`` and ``validation``, and in each a folder for every class.
"""

import argparse

import timm_knapsack as tk  # isort: skip  (before timm)
import timm
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, CheckpointSaver, accuracy, dispatch_clip_grad


def loader(data, model, split, batch_size, training):
    config = resolve_data_config(model=model)
    dataset = create_dataset("", root=data, split=split, is_training=training, batch_size=batch_size)
    shape = {key: config[key] for key in ("input_size", "mean", "std", "interpolation", "crop_pct")}
    return create_loader(
        dataset, batch_size=batch_size, is_training=training, use_prefetcher=False, num_workers=0, hflip=0.0, **shape
    )


def train_one_epoch(epoch, task, batches, optimizer, scheduler, device):
    losses = AverageMeter()
    task.get_trainable_module().train()  # not task.train(), which would put the teacher into train mode
    update = epoch * len(batches)
    for images, target in batches:
        result = task(images.to(device), target.to(device))
        optimizer.zero_grad()
        result["loss"].backward()
        dispatch_clip_grad(task.get_clip_parameters(), 1.0, mode="norm")
        optimizer.step()
        update += 1
        task.update_ema(step=update)
        scheduler.step_update(num_updates=update)
        losses.update(result["loss"].item(), len(images))
    parts = ", ".join(f"{name} {result[name].item():.3f}" for name in ("task_loss", "kd_loss", "ikd_loss"))
    print(f"epoch {epoch}: loss {losses.avg:.3f} ({parts} in the last batch)")


@torch.no_grad()
def validate(model, batches, device):
    top1 = AverageMeter()
    model.eval()
    for images, target in batches:
        top1.update(accuracy(model(images.to(device)), target.to(device))[0].item(), len(images))
    return {"top1": top1.avg}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--checkpoint", default="", help="weights of the original; timm's pretrained ones by default")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--budget", type=float, default=0.5, help="share of the MACs that may be left")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--output", default="tuned")
    options = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = {"pretrained": not options.checkpoint, "checkpoint_path": options.checkpoint}
    teacher = timm.create_model(options.model, num_classes=options.classes, **weights).to(device).eval()
    train = loader(options.data, teacher, "train", options.batch_size, training=True)
    validation = loader(options.data, teacher, "validation", options.batch_size, training=False)

    student = tk.prune(teacher, train, budget=tk.Budget(macs=options.budget)).model
    task = tk.InnerDistillationTask(student, teacher, torch.nn.CrossEntropyLoss(), device=device)
    task.init_from_data(batch for batch, _ in zip(train, range(8), strict=False))  # M_l: better than their selection
    task.setup_ema(decay=0.99)

    optimizer = create_optimizer_v2(task.get_trainable_module(), "sgd", lr=options.lr, weight_decay=1e-4)
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=options.epochs, step_on_epochs=False, updates_per_epoch=len(train)
    )
    saver = CheckpointSaver(student, optimizer, task=task, checkpoint_dir=".", recovery_dir=".")
    start = validate(task.get_eval_model(), validation, device)["top1"]
    for epoch in range(options.epochs):
        train_one_epoch(epoch, task, train, optimizer, scheduler, device)
        metrics = validate(task.get_eval_model(ema=True), validation, device)
        print(f"epoch {epoch}: top-1 of the average {metrics['top1']:.2f} %, {start:.2f} % at the start")
        saver.save_checkpoint(epoch, metric=metrics["top1"])
    averaged = task.get_eval_model(ema=True).module
    averaged.channel_config = student.channel_config
    tk.save_pretrained(averaged, options.output)
    print(f'timm.create_model("local-dir:{options.output}", pretrained=True)')


if __name__ == "__main__":
    main()
