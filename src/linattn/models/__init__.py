"""Models built of the layers, in the form of transformers, whose Auto classes know them.

from linattn.models import LinattnConfig, LinattnForCausalLM
model = LinattnForCausalLM(LinattnConfig(mixer="metala"))
"""

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )
except ImportError as error:
    raise ImportError(
        f"linattn.models needs {error.name}: pip install 'linattn[models]'", name=error.name
    ) from error

from linattn.models.classification import (
    LinattnForImageClassification,
    LinattnForSequenceClassification,
)
from linattn.models.configuration import LinattnConfig
from linattn.models.modeling import LinattnForCausalLM, LinattnModel

__all__ = [
    "LinattnConfig",
    "LinattnForCausalLM",
    "LinattnForImageClassification",
    "LinattnForSequenceClassification",
    "LinattnModel",
]

AutoConfig.register("linattn", LinattnConfig)
AutoModel.register(LinattnConfig, LinattnModel)
AutoModelForCausalLM.register(LinattnConfig, LinattnForCausalLM)
AutoModelForImageClassification.register(LinattnConfig, LinattnForImageClassification)
AutoModelForSequenceClassification.register(LinattnConfig, LinattnForSequenceClassification)
