// The Python modeling file that goes into a checkpoint whose normalizer transformers does not know
// (attention/modeling_attn_gpt.py).
#ifndef ATTENTION_MODELING_H
#define ATTENTION_MODELING_H

#define MODELING_FILE "modeling_attn_gpt.py"
extern const char modeling_text[];

#endif
