"""Batches whose labels are not one for each image, and folders that can't be."""

from dataclasses import replace

import pytest
import torch
from test_finetune import PLAIN, batches, network

from timm_knapsack.errors import CheckpointError, TrainingError
from timm_knapsack.training.finetuning import FinetuneConfig, evaluate, finetune

CONFIG = FinetuneConfig(epochs=1, lr=0.05, distillation=PLAIN)


@pytest.mark.parametrize("mixup", [0.0, 0.2])
@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_batch_with_fewer_labels_than_images_is_named(left, mixup):
    given = batches()
    given[2] = given[2][0], given[2][1][:left]
    words = f"^there must be a label for each of the 4 images of batch 2 of epoch 0, got {left}$"
    with pytest.raises(TrainingError, match=words):
        finetune(network(3), None, given, None, replace(CONFIG, mixup=mixup))


@pytest.mark.parametrize("soft", [False, True])
def test_one_label_is_not_counted_against_all_images(soft):
    given = batches()
    labels = torch.nn.functional.one_hot(given[1][1], 4).float() if soft else given[1][1]
    given[1] = given[1][0], labels[:1]
    with pytest.raises(TrainingError, match="for each of the 4 images of batch 1 of the evaluation data, got 1"):
        evaluate(network(3), given)


def test_a_folder_whose_name_no_folder_has():
    said = r"^can't use .* for checkpoints: .*embedded null (byte|character.*); choose another"
    with pytest.raises(CheckpointError, match=said):
        finetune(network(3), None, batches(), None, replace(CONFIG, output_dir="a\0b"))
