"""Problems become token ids here, and nowhere else: training and evaluation must ask in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from megatron_qerl.config.schema import DataSection
from megatron_qerl.errors import ConfigError, DataError
from megatron_qerl.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptRenderer:
    """Renders problems with one tokenizer and one system prompt.

    With ``chat_template`` the question is the user's message and the text ends where the assistant begins.
    ``system_prompt: null`` leaves the system message to the template (which may insert its own), ``""`` asks for an
    empty one. Without ``chat_template`` the text is system prompt, blank line, question.

    Args:
        tokenizer: a transformers tokenizer.
        section: the data section.
        max_prompt_tokens: longest prompt allowed.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template rejects or drops the system prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: DataSection, max_prompt_tokens: int) -> None:
        self._tokenizer: Any = tokenizer
        self._section = section
        self._max_prompt_tokens = max_prompt_tokens
        if section.chat_template and not self._tokenizer.chat_template:
            raise ConfigError(
                "data.chat_template", True, "the tokenizer has no chat template", "set data.chat_template: false"
            )
        if section.chat_template and section.system_prompt:
            self._require_system_prompt_in(self._chat_text("1 + 1"))

    def render(self, problem: Problem) -> Prompt:
        """The prompt of one problem.

        Raises:
            DataError: the prompt has more than ``max_prompt_tokens`` tokens, or none.
        """
        text = self._chat_text(problem.question) if self._section.chat_template else self._plain_text(problem.question)
        # A chat template writes its own special tokens; plain text gets the tokenizer's (such as BOS).
        encoded = self._tokenizer(text, add_special_tokens=not self._section.chat_template)
        token_ids = tuple(int(token) for token in encoded["input_ids"])
        if not token_ids:
            raise DataError(f"problem {problem.uid}", problem.question, "its prompt has no tokens", "remove it")
        if len(token_ids) > self._max_prompt_tokens:
            raise DataError(
                f"problem {problem.uid} ({problem.source})",
                f"{len(token_ids)} prompt tokens",
                f"rollout.max_prompt_tokens allows {self._max_prompt_tokens}",
                "raise it, shorten data.system_prompt, or remove the problem",
            )
        return Prompt(problem=problem, token_ids=token_ids)

    def _chat_text(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        if self._section.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._section.system_prompt})
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(
                "data.system_prompt",
                self._section.system_prompt,
                f"the tokenizer's chat template refuses these messages ({error})",
                "set data.system_prompt: null and put the instruction into prompt_suffix",
            ) from error
        return str(text)

    def _plain_text(self, question: str) -> str:
        system = self._section.system_prompt
        return f"{system}\n\n{question}" if system else question

    def _require_system_prompt_in(self, text: str) -> None:
        assert self._section.system_prompt is not None
        if self._section.system_prompt.strip() not in text:
            raise ConfigError(
                "data.system_prompt",
                self._section.system_prompt,
                "the tokenizer's chat template drops the system message, so the model would never see it",
                "set data.system_prompt: null and put the instruction into prompt_suffix",
            )
