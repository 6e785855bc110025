#include "eval/needle.h"

// data/cities.txt and a final 0, taken in by the assembler. The Makefile makes this object depend on the file.
__asm__(".section .rodata\n"
        ".global cities_text\n"
        "cities_text:\n"
        ".incbin \"data/cities.txt\"\n"
        ".byte 0\n"
        ".previous\n");
