// The Python modeling file (attention/modeling_attn_gpt.py) that is saved in a checkpoint if transformers does not
// support its normalizer.
#ifndef ATTENTION_MODELING_H
#define ATTENTION_MODELING_H

#define MODELING_FILE "modeling_attn_gpt.py"
extern const char modeling_text[];

#endif
