"""Log a training to Weights & Biases or to MLflow, without a connection: ``python train.py wandb`` or ``mlflow``."""

import importlib
import os
import sys

import torch
import torch.distributed as dist

import thinwire as tw

FOLDER = "tracked"


def package(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        sys.exit(f"{name} is not installed: pip install {name}")


def tracker(name):
    """Return what a StepLog calls after each step, and what ends the tracker's run."""
    if name == "wandb":
        # "wandb sync tracked/wandb/offline-run-..." sends it later
        run = package("wandb").init(project="thinwire", mode="offline", dir=FOLDER)
        return lambda step, figures: run.log(figures, step=step), run.finish
    mlflow = package("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{FOLDER}/mlflow.db")  # "mlflow ui --backend-store-uri sqlite:///..." shows it
    mlflow.start_run()
    return lambda step, figures: mlflow.log_metrics(figures, step=step), mlflow.end_run


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "wandb"
    if name not in ("wandb", "mlflow"):
        sys.exit(f"{name!r} is no tracker of this example: give wandb or mlflow")
    if "RANK" in os.environ:  # set by torchrun and by thinwire lab run
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.makedirs(FOLDER, exist_ok=True)
    on_step, end = tracker(name) if rank == 0 else (None, lambda: None)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = tw.attach(model, optimizer, "local")
    data = torch.Generator().manual_seed(rank)
    with tw.StepLog(sync, f"{FOLDER}/steps.jsonl", on_step=on_step) as log:
        for _ in range(50):
            x = torch.randn(32, 64, generator=data)
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(loss=loss)
    sync.finish()
    sync.close()
    end()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
