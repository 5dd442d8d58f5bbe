"""Room training: distillation, fine-tuning, evaluation.

In: a student, its teacher, loaders, a config.
Out: the tuned student, checkpoints that resume exactly, accuracies.
"""
