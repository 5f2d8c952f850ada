"""Callbacks in the styles that people use: readers of state and model, loggers like W&B, stops, and LoRA adapters."""

from typing import Any

import peft
import transformers

from tests.guarantees.drop_in_scripts.styles.recipes import Recipe, accuracy, classification, classifier, labelled


def curious_callback(hf: Any) -> Recipe:
    """Read arguments, state and model in events."""

    class Curious(hf.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recipe.notes.append(("begin", state.max_steps, args.per_device_train_batch_size, state.num_train_epochs))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            recipe.notes.append((state.global_step, state.epoch, round(float(model.classifier.bias.sum()), 4)))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                recipe.notes.append(("loss", round(logs["loss"], 4), state.log_history[-1]["step"]))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            recipe.notes.append(("evaluated", state.global_step, round(metrics["eval_loss"], 4)))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rate = kwargs["optimizer"].param_groups[0]["lr"]
            recipe.notes.append(("end", state.global_step, rate, type(kwargs["model"]).__name__))

    recipe = classification(hf.Trainer, settings={"eval_strategy": "epoch"}, options={"callbacks": [Curious()]})
    return recipe


def board_callback(hf: Any) -> Recipe:
    """Report to a board as integrations do: set up once, rename the values of the log, finish at the end."""

    class BoardCallback(hf.TrainerCallback):
        def __init__(self) -> None:
            self.is_ready = False

        def setup(self, args: Any, state: Any, model: Any) -> None:
            self.is_ready = True
            if state.is_world_process_zero:
                config = {**args.to_sanitized_dict(), **model.config.to_dict()}
                recipe.notes.append(("config", config["learning_rate"], config["hidden_size"]))

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if not self.is_ready:
                self.setup(args, state, model)

        def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero:
                renamed = {
                    "eval/" + name[5:] if name.startswith("eval_") else "train/" + name: round(value, 4)
                    for name, value in logs.items()
                    if name in ("loss", "eval_loss", "eval_accuracy", "learning_rate", "epoch")
                }
                recipe.notes.append((state.global_step, renamed))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recipe.notes.append("finished")

    recipe = classification(
        hf.Trainer,
        settings={"eval_strategy": "steps", "eval_steps": 4},
        options={"callbacks": [BoardCallback], "compute_metrics": accuracy},
    )
    return recipe


def stopping_callback(hf: Any) -> Recipe:
    """Stop, evaluate and save by the control object."""

    class Stopping(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_evaluate = state.global_step == 2
            control.should_training_stop = state.global_step == 5
            return control

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            recipe.notes.append((state.global_step, round(metrics["eval_loss"], 4)))

    recipe = classification(hf.Trainer, options={"callbacks": [Stopping()]})
    return recipe


def early_stopping(hf: Any) -> Recipe:
    """Stop when the evaluation does not improve, and load the best model."""
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "num_train_epochs": 20,
    }
    callbacks = [transformers.EarlyStoppingCallback(early_stopping_patience=2)]
    return classification(hf.Trainer, settings=settings, options={"callbacks": callbacks, "compute_metrics": accuracy})


def adapters(hf: Any) -> Recipe:
    """Train LoRA adapters of peft."""
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["query", "value"]
    )
    model = peft.get_peft_model(classifier(), config)
    names, options = {"label_names": ["labels"]}, {"compute_metrics": accuracy}
    return Recipe(hf.Trainer, model, labelled(16), labelled(6, seed=2), settings=names, options=options)
