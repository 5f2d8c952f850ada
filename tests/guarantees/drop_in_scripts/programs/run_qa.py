"""Script in the style of run_qa: answers in a text, by a trainer that post-processes the predictions of all features."""

import json
import logging
import math
import os
import time
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import PredictionOutput, speed_metrics

from tests.guarantees.drop_in_scripts.programs.answers import best_answers, evaluation_features, training_features
from tests.guarantees.drop_in_scripts.programs.script_parts import (
    DataArguments,
    ModelArguments,
    find_checkpoint,
    first_samples,
    parse,
    publish,
    run_training,
    set_up_logging,
)

logger = logging.getLogger(__name__)


class QuestionAnsweringTrainer(Trainer):
    """Trainer that computes metrics of answers, for which it needs the examples behind the features."""

    def __init__(self, *args: Any, eval_examples: Any = None, post_process_function: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def loop_without_metrics(self, dataloader: Any, description: str, ignore_keys: Any, prefix: str) -> Any:
        """Run the loop without metrics, and add the speed."""
        compute_metrics = self.compute_metrics
        self.compute_metrics = None
        start_time = time.time()
        try:
            output = self.evaluation_loop(
                dataloader,
                description=description,
                # Without metrics, the loop would not collect predictions.
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        total_batch_size = self.args.eval_batch_size * self.args.world_size
        num_steps = math.ceil(output.num_samples / total_batch_size)
        output.metrics.update(speed_metrics(prefix, start_time, num_samples=output.num_samples, num_steps=num_steps))
        return output

    def with_prefix(self, metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
        return {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}

    def evaluate(
        self,
        eval_dataset: Any = None,
        eval_examples: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        eval_dataloader = self.get_eval_dataloader(eval_dataset)
        eval_examples = self.eval_examples if eval_examples is None else eval_examples
        output = self.loop_without_metrics(eval_dataloader, "Evaluation", ignore_keys, metric_key_prefix)
        if self.post_process_function is not None and self.compute_metrics is not None and self.args.should_save:
            # Only the main process writes answers.
            eval_preds = self.post_process_function(eval_examples, eval_dataset, output.predictions)
            metrics = self.with_prefix(self.compute_metrics(eval_preds), metric_key_prefix)
            metrics.update(output.metrics)
        else:
            metrics = output.metrics
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self,
        predict_dataset: Any,
        predict_examples: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        predict_dataloader = self.get_test_dataloader(predict_dataset)
        output = self.loop_without_metrics(predict_dataloader, "Prediction", ignore_keys, metric_key_prefix)
        if self.post_process_function is None or self.compute_metrics is None:
            return output
        predictions = self.post_process_function(predict_examples, predict_dataset, output.predictions, "predict")
        metrics = self.with_prefix(self.compute_metrics(predictions), metric_key_prefix)
        metrics.update(output.metrics)
        return PredictionOutput(predictions=predictions.predictions, label_ids=predictions.label_ids, metrics=metrics)


def compute_metrics(p: EvalPrediction) -> dict[str, float]:
    found = {one["id"]: one["prediction_text"] for one in p.predictions}
    pairs = [(found[one["id"]], one["answer"]) for one in p.label_ids]
    overlaps = [len(set(a.split()) & set(b.split())) / len(set(a.split()) | set(b.split())) for a, b in pairs]
    return {
        "exact_match": 100 * sum(a == b for a, b in pairs) / len(pairs),
        "overlap": 100 * sum(overlaps) / len(overlaps),
    }


def make_post_processing(output_dir: str) -> Any:
    def post_processing_function(examples: Any, features: Any, predictions: Any, stage: str = "eval") -> EvalPrediction:
        answers = best_answers(examples, features, predictions)
        with open(os.path.join(output_dir, f"{stage}_predictions.json"), "w") as writer:
            json.dump(answers, writer, indent=1)
        return EvalPrediction(
            predictions=[{"id": key, "prediction_text": text} for key, text in answers.items()],
            label_ids=[{"id": example["id"], "answer": example["answer"]} for example in examples],
        )

    return post_processing_function


def prepare_data(raw_datasets: Any, tokenizer: Any, training_args: Any, data_args: DataArguments) -> dict[str, Any]:
    prepared = {}
    for split, examples in raw_datasets.items():
        prepare = training_features if split == "train" else evaluation_features
        with training_args.main_process_first(desc=f"{split} dataset map pre-processing"):
            prepared[split] = examples.map(
                lambda batch, prepare=prepare: prepare(tokenizer, batch, data_args.max_seq_length),
                batched=True,
                remove_columns=examples.column_names,
                desc="Tokenize",
                **data_args.map_options,
            )
    return prepared


def run_evaluation(trainer: Any, eval_dataset: Any) -> None:
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def run_prediction(trainer: Any, predict_dataset: Any, predict_examples: Any) -> None:
    results = trainer.predict(predict_dataset, predict_examples)
    metrics = results.metrics
    metrics["predict_samples"] = len(predict_dataset)
    trainer.log_metrics("predict", metrics)
    trainer.save_metrics("predict", metrics)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    set_up_logging(logger, training_args)
    checkpoint = find_checkpoint(logger, training_args)
    set_seed(training_args.seed)

    raw_datasets = load_dataset("json", data_files=data_args.data_files, cache_dir=model_args.cache_dir)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(model_args.model_name_or_path, config=config)
    prepared = prepare_data(raw_datasets, tokenizer, training_args, data_args)
    train_dataset = first_samples(prepared["train"], data_args.max_train_samples)

    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=prepared["validation"] if training_args.do_eval else None,
        eval_examples=raw_datasets["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        post_process_function=make_post_processing(training_args.output_dir),
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        run_training(trainer, checkpoint, train_dataset, data_args)
    if training_args.do_eval:
        run_evaluation(trainer, prepared["validation"])
    if training_args.do_predict:
        run_prediction(trainer, prepared["test"], raw_datasets["test"])
    publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="question-answering")


if __name__ == "__main__":
    main()
