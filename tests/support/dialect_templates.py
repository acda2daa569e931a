"""Small chat templates of our own, one for each dialect: the marks, fields and order that its models' templates have.

They are written from the pages that docs/references.md names under the dialect.
"""

from __future__ import annotations

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' ~ (tools | tojson) ~ '\\n@CALLS@<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.reasoning_content %}{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}@CALL@{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
PAIRS = "{% for key, value in call.function.arguments.items() %}"
VALUE = "{{ value if value is string else value | tojson }}"


def chatml(hint: str, call: str) -> str:
    """Makes a template that shows `hint` with the tools, and writes each call as `call`."""
    return CHATML.replace("@CALLS@", hint).replace("@CALL@", call)


HERMES = chatml(
    "<tool_call></tool_call>",
    "{{ '\\n<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' }}",
)
LISTED = """\
{%- if loop.first %}@BEGIN@{% else %}, {% endif %}
{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments @ID@~ '}' }}
{%- if loop.last %}@END@{% endif %}"""
HUNYUAN = chatml(
    "<tool_calls>[]</tool_calls>",
    LISTED.replace("@BEGIN@", "<tool_calls>[").replace("@END@", "]</tool_calls>").replace("@ID@", ""),
)
MISTRAL = chatml(
    "[TOOL_CALLS]",
    "{{ raise_exception('ids have 9 letters') if call.id | length != 9 }}"
    + LISTED.replace("@BEGIN@", "[TOOL_CALLS] [").replace("@END@", "]").replace("@ID@", "~ ', \"id\": ' ~ call.id "),
)
ERNIE = HERMES.replace("<tool_call></tool_call>", "<tool_call></tool_call><response></response>")
GRANITE = """\
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' ~ (tools | tojson(indent=4)) ~ '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""
QWEN_XML = chatml(
    "<tool_call><function=NAME></function></tool_call>",
    "{{ '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}"
    + PAIRS
    + "{{ '<parameter=' ~ key ~ '>\\n' }}"
    + VALUE
    + "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}",
)
GLM = chatml(
    "<tool_call>NAME<arg_key></arg_key></tool_call>",
    "{{ '\\n<tool_call>' ~ call.function.name ~ '\\n' }}"
    + PAIRS
    + "{{ '<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' }}"
    + VALUE
    + "{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}",
)
MINIMAX = """\
{%- if tools %}{{ ']~b]system\\n' ~ (tools | tojson) ~ '<minimax:tool_call></minimax:tool_call>[e~[\\n' }}{% endif %}
{%- for message in messages %}
    {{- ']~b]' ~ message.role ~ '\\n' }}
    {%- if message.reasoning_content %}{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- '\\n<minimax:tool_call>\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<invoke name="' ~ call.function.name ~ '">\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<parameter name="' ~ key ~ '">' ~ (value if value is string else value | tojson) }}
                {{- '</parameter>\\n' }}
            {%- endfor %}
            {{- '</invoke>\\n' }}
        {%- endfor %}
        {{- '</minimax:tool_call>' }}
    {%- endif %}
    {{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}
"""
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>' ~ (tools | tojson) ~ '<|end|>' }}{% endif %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>functions.' ~ last.name ~ ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (message.content | tojson) ~ '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- if message.content and message.thinking %}{{ raise_exception('either content or thinking') }}{% endif %}
        {%- set thought = message.content or message.thinking %}
        {%- if thought %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ thought ~ '<|end|>' }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments | tojson) ~ '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ '<|end|>' }}
    {%- else %}
        {{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
GEMMA = """\
{%- macro written(value) %}
    {%- if value is string %}{{ '<|"|>' ~ value ~ '<|"|>' }}
    {%- elif value is mapping %}
        {{- '{' }}{% for key, one in value | dictsort %}{{ (',' if not loop.first else '') ~ key ~ ':' ~ written(one) }}
        {%- endfor %}{{ '}' }}
    {%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{{- '<bos>' }}
{%- if tools or enable_thinking %}
    {{- '<|turn>system\\n' ~ ('<|think|>' if enable_thinking else '') ~ (tools | tojson) ~ '<turn|>\\n' }}
{%- endif %}
{%- set last = namespace(result=false) %}
{%- for message in messages %}
    {%- set last.result = false %}
    {{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' ~ call.function.name ~ written(call.function.arguments) ~ '<tool_call|>' }}
    {%- endfor %}
    {%- for result in message.tool_responses or [] %}
        {%- set last.result = true %}
        {{- '<|tool_response>response:' ~ result.name }}
        {{- written(result.response if result.response is mapping else {'value': result.response}) }}
        {{- '<tool_response|>' }}
    {%- endfor %}
    {{- message.content }}
    {%- if not last.result %}{{ '<turn|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if not last.result %}{{ '<|turn>model\\n' }}{% endif %}
    {%- if not enable_thinking %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}
{%- endif %}
"""
DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' ~ (tools | tojson if tools else '') }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<｜User｜>' ~ message.content }}
    {%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜></think>' ~ message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' ~ ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- else %}{{ message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}{% endif %}
"""
DEEPSEEK_R1 = (
    DEEPSEEK.replace("'<｜tool▁call▁begin｜>' +", "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' +")
    .replace("+ '<｜tool▁sep｜>' + call.function.arguments", "+ '\\n```json\\n' + call.function.arguments + '\\n```'")
    .replace("('<think>' if thinking else '</think>')", "'<think>\\n'")
)
KIMI = """\
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' ~ (tools | tojson) ~ '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_' ~ message.role ~ '|>' ~ message.role ~ '<|im_middle|>' }}
    {%- if message.role == 'tool' %}{{ '## Return of ' ~ message.tool_call_id ~ '\\n' }}{% endif %}
    {%- if message.role == 'assistant' %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_calls_section_begin|>' if loop.first }}
        {{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' ~ (call.function.arguments | tojson) }}
        {{- '<|tool_call_end|>' ~ ('<|tool_calls_section_end|>' if loop.last else '') }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
TEMPLATES = {
    "hermes": HERMES,
    "harmony": HARMONY,
    "ernie": ERNIE,
    "hunyuan": HUNYUAN,
    "granite": GRANITE,
    "mistral": MISTRAL,
    "qwen-xml": QWEN_XML,
    "glm": GLM,
    "minimax": MINIMAX,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "deepseek-r1": DEEPSEEK_R1,
    "kimi": KIMI,
}
