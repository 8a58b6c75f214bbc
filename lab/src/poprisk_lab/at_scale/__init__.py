"""Knowing at the size people train: CIFAR-10N with ResNet-18, and a language model fine-tuned with LoRA."""
