"""lm-eval on a task file of our own, without a network."""

import json

import pytest
import torch
from test_scores import tiny

from linattn.evaluate.harness import harness
from linattn.models.tokenizers import byte_tokenizer

pytest.importorskip("lm_eval")
TASK = """
task: two_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def test_a_local_task_scores_as_the_model_itself(tmp_path):
    m = tiny("metala")
    m.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    documents = [
        {"question": f"{name} = ", "choices": ["1;", "x;", "ab;"], "answer": i % 3}
        for i, name in enumerate(("a", "bc", "d", "efg", "h", "ij", "k"))
    ]
    lines = "\n".join(json.dumps(document) for document in documents)
    (tmp_path / "documents.jsonl").write_text(lines)
    (tmp_path / "tasks").mkdir()
    path = tmp_path / "tasks" / "two_words.yaml"
    path.write_text(TASK.format(path=tmp_path / "documents.jsonl"))
    found = harness(tmp_path / "model", ["two_words"], include=tmp_path / "tasks", rows=2)
    right = 0
    for document in documents:
        context = document["question"].rstrip().encode()  # the harness moves a space over
        scores = []
        for choice in document["choices"]:
            text = (document["question"] + choice).encode()
            logs = m(torch.tensor([list(text)])).logits[0].log_softmax(-1)
            scores.append(sum(logs[t - 1, text[t]].item() for t in range(len(context), len(text))))
        right += max(range(3), key=scores.__getitem__) == document["answer"]
    assert {(r["task"], r["metric"]) for r in found} == {("two_words", "acc")}
    assert found[0]["value"] == pytest.approx(right / len(documents))


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="task: got \\['no_such_task'\\]"):
        harness(tmp_path, ["no_such_task"])
    with pytest.raises(ValueError, match="include: got"):
        harness(tmp_path, ["two_words"], include=tmp_path / "none")
