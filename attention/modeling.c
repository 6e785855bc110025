#include "attention/modeling.h"

// The file's own bytes and a final 0, taken in by the assembler. The Makefile makes this object depend on the file.
__asm__(".section .rodata\n"
        ".global modeling_text\n"
        "modeling_text:\n"
        ".incbin \"attention/modeling_attn_gpt.py\"\n"
        ".byte 0\n"
        ".previous\n");
