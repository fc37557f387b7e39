"""Problems become prompts: chat templates, system prompts, and the length limit."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_qerl.config.schema import DataSection, DatasetSection
from megatron_qerl.data.prompts import PromptRenderer
from megatron_qerl.errors import ConfigError, DataError
from megatron_qerl.types import Problem

CHAT = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<s> default {% endif %}"
    "<{{ m['role'][0] }}> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}<a>"
WORDS = ["<bos>", "<s>", "<u>", "<a>", "default", "Be", "brief", "What", "is", "3", "+", "4", "?", "1", "[UNK]"]
PROBLEM = Problem("add:3,4:0", "What is 3 + 4 ?", "7", "add:3,4", "arithmetic")


def tokenizer(chat_template=CHAT):
    """Words and a <bos> that the tokenizer puts before plain text."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", bos_token="<bos>")
    made.chat_template = chat_template
    return made


def section(**keys):
    arithmetic = DatasetSection(kind="arithmetic")
    return DataSection(train=arithmetic, eval=arithmetic, **keys)


def words(prompt):
    return " ".join(WORDS[token] for token in prompt.token_ids)


def test_the_templates_own_system_message_is_left_alone():
    prompt = PromptRenderer(tokenizer(), section(), 99).render(PROBLEM)
    assert words(prompt) == "<s> default <u> What is 3 + 4 ? <a>"
    assert prompt.problem is PROBLEM
    assert all(type(token) is int for token in prompt.token_ids)


def test_a_system_prompt_replaces_it():
    prompt = PromptRenderer(tokenizer(), section(system_prompt="Be brief"), 99).render(PROBLEM)
    assert words(prompt) == "<s> Be brief <u> What is 3 + 4 ? <a>"


def test_an_empty_system_prompt_is_an_empty_system_message():
    prompt = PromptRenderer(tokenizer(), section(system_prompt=""), 99).render(PROBLEM)
    assert words(prompt) == "<s> <u> What is 3 + 4 ? <a>"


def test_rendering_agrees_with_the_tokenizers_own_chat_encoding():
    own = tokenizer()
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": PROBLEM.question}]
    encoded = own.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    prompt = PromptRenderer(own, section(system_prompt="Be brief"), 99).render(PROBLEM)
    assert list(prompt.token_ids) == list(encoded["input_ids"])


def test_without_a_chat_template_the_tokenizer_adds_its_special_tokens():
    plain = section(chat_template=False, system_prompt="Be brief")
    assert words(PromptRenderer(tokenizer(None), plain, 99).render(PROBLEM)) == "<bos> Be brief What is 3 + 4 ?"
    bare = section(chat_template=False)
    assert words(PromptRenderer(tokenizer(), bare, 99).render(PROBLEM)) == "<bos> What is 3 + 4 ?"


def test_a_prompt_at_the_limit_passes_and_one_token_more_is_named():
    exact = PromptRenderer(tokenizer(), section(), 10)
    assert len(exact.render(PROBLEM).token_ids) == 10
    with pytest.raises(DataError) as caught:
        PromptRenderer(tokenizer(), section(), 9).render(PROBLEM)
    message = str(caught.value)
    for fragment in ("add:3,4:0", "arithmetic", "10 prompt tokens", "rollout.max_prompt_tokens allows 9"):
        assert fragment in message


def test_a_prompt_without_tokens_is_an_error():
    empty = Problem("e", "", "7", "e", "demo")
    backend = tokenizer("{{ messages[0]['content'] }}")
    with pytest.raises(DataError, match="no tokens"):
        PromptRenderer(backend, section(), 99).render(empty)


def test_a_tokenizer_without_a_chat_template_is_refused():
    with pytest.raises(ConfigError, match=r"data\.chat_template.*set data\.chat_template: false"):
        PromptRenderer(tokenizer(None), section(), 99)


def test_a_template_that_refuses_the_system_role_is_a_config_error():
    with pytest.raises(ConfigError, match=r"data\.system_prompt = Be brief.*no system role.*prompt_suffix"):
        PromptRenderer(tokenizer(NO_SYSTEM), section(system_prompt="Be brief"), 99)
    PromptRenderer(tokenizer(NO_SYSTEM), section(), 99).render(PROBLEM)


def test_a_template_that_drops_the_system_prompt_is_a_config_error():
    with pytest.raises(ConfigError, match=r"data\.system_prompt = Be brief.*drops the system message"):
        PromptRenderer(tokenizer(DROPS_SYSTEM), section(system_prompt="Be brief"), 99)
    PromptRenderer(tokenizer(DROPS_SYSTEM), section(), 99).render(PROBLEM)
