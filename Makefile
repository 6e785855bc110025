# make              builds the CPU programs
# make help         says what was found on this machine, and what each absence turns off
# make test         the C tests, from kept fixtures, with no Python
# make SAN=1 ...    the same with AddressSanitizer and UBSan, in build/san

CC      ?= gcc
MARCH   ?= native
OPT     ?= -O3
WERROR  ?= 0
SAN     ?= 0
FAULTS  ?= 0

# ---- what is there: 1 or 0, and each can be turned off by hand (make ONEDNN=0)
hash   := \#
header  = $(shell echo '$(hash)include <$(1)>' | $(CC) -fsyntax-only -x c - 2>/dev/null && echo 1 || echo 0)
MPICC   ?= mpicc
ONEDNN  := $(or $(ONEDNN),$(call header,dnnl.h))
BLAS    := $(or $(BLAS),$(call header,cblas.h))
MPI     := $(or $(MPI),$(if $(shell command -v $(MPICC)),1,0))
CJSON   := $(call header,cjson/cJSON.h)
XXHASH  := $(call header,xxhash.h)

# ---- flags
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
CFLAGS   = -std=gnu11 $(OPT) -g -march=$(MARCH) -fopenmp -fno-math-errno -fno-trapping-math -Wall -Wextra -MMD -MP -I.
LDFLAGS  = -fopenmp
LDLIBS   = -lcjson -lxxhash -lm
ifeq ($(WERROR),1)
  CFLAGS += -Werror
endif
ifeq ($(SAN),1)
  CFLAGS  += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
  LDFLAGS += -fsanitize=address,undefined
endif
ifeq ($(FAULTS),1)
  CFLAGS += -DFAULTS
endif
ifeq ($(ONEDNN),1)
  CFLAGS += -DUSE_ONEDNN
  LDLIBS += -ldnnl
else ifeq ($(BLAS),1)
  CFLAGS += -DUSE_CBLAS
  LDLIBS += $(or $(BLAS_LIBS),-lopenblas)
endif
ifeq ($(MPI),1)
  CFLAGS += -DUSE_MPI $(shell $(MPICC) --showme:compile)
  LDLIBS += $(shell $(MPICC) --showme:link)
endif

BUILD   ?= build$(if $(filter 1,$(SAN)),/san)$(if $(filter 1,$(FAULTS)),/faults)
BIN     ?= $(if $(filter build,$(BUILD)),.,$(BUILD))
PROGRAMS = train_gpt2
LIBRARY  = $(patsubst %.c,$(BUILD)/%.o,$(wildcard model.c runtime/*.c attention/*.c))
TESTS    = $(patsubst dev/tests/%.c,$(BUILD)/tests/%,$(wildcard dev/tests/test_*.c))

all: $(addprefix $(BIN)/,$(PROGRAMS))

$(addprefix $(BIN)/,$(PROGRAMS) test_gpt2): $(BIN)/%: $(BUILD)/%.o $(LIBRARY)
	@echo '  LD  $@'
	@$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/tests/%: $(BUILD)/dev/tests/%.o $(LIBRARY)
	@mkdir -p $(@D)
	@echo '  LD  $@'
	@$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CC  $<'
	@$(CC) $(CFLAGS) -c -o $@ $<

# Objects depend on the flags that they were built with: a changed flag rebuilds, an unchanged one does not.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CFLAGS)' | cmp -s - $@ || echo '$(CC) $(CFLAGS)' > $@

$(BUILD)/attention/modeling.o: attention/modeling_attn_gpt.py

clean:
	rm -rf build train_gpt2 sample_gpt2 test_gpt2

.PHONY: all clean FORCE
.SECONDARY:
-include $(LIBRARY:.o=.d) $(patsubst %,$(BUILD)/%.d,$(PROGRAMS) test_gpt2) $(patsubst dev/tests/%.c,$(BUILD)/dev/tests/%.d,$(wildcard dev/tests/*.c))
