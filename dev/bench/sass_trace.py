"""Follows one warp through a kernel's SASS and counts what it issues.

The output of nvdisasm is parsed into instructions, and lane 0 of the warp is followed through them, starting from the
kernel's arguments and its position in the grid. Integers, predicates and floats derived from these are computed; values
from global memory, a matmul or a special function are unknown. So loops are counted, not guessed. If a branch depends
on something unknown (the slow path of a division, for example), we assume that it does not take a path that calls a
subroutine, and otherwise that it falls through. `Trace.assumed` lists these branches.

Of shared memory, what the followed lane itself has stored is known, and what `shared` contains: the shared memory of
the trace of another thread, which stored it before a barrier. Stores of other lanes are not seen. `drawn` lists what
atomic operations on global memory return, one after the other, such as the numbers that a block draws from a counter;
after the last, their results are unknown.

An instruction whose predicate is false is still issued, and therefore counted. All lanes are assumed to take the same
path.
"""
import re
import struct
from collections import Counter

MASK = 0xFFFFFFFF
UNIFORM = ("UIADD3", "UIMAD", "UMOV", "USEL", "USHF", "ULEA", "ULOP3", "UISETP", "UPLOP3", "ULDC", "UIABS", "UVIMNMX",
           "UVIADD", "UFLO", "UPOPC")
CONVERSIONS = ("F2F", "F2I", "I2F", "FRND")
CONTROL = ("BRA", "BRX", "JMP", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "BAR", "DEPBAR", "LDGDEPBAR", "NOP",
           "BMOV", "YIELD", "ENDCOLLECTIVE", "WARPSYNC")
MEMORY = ("LDG", "STG", "LDL", "STL", "LD", "ST", "LDC", "ULDC", "RED", "REDG", "ATOM", "ATOMG", "CCTL", "MEMBAR")
SHARED = ("LDSM", "LDS", "STS", "STSM")
FMA = ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HMUL2", "HADD2", "DFMA", "DMUL", "DADD")
PIPES = ("HMMA", "MUFU", "FMA", "ALU", "LDSM", "LDGSTS", "SHFL", "branch", "memory")


def pipe(opcode):
    """The pipe that an instruction goes to. HMMA includes wgmma; MUFU the conversions that share its unit; LDSM LDS,
    STS and STSM."""
    name = opcode.split(".")[0]
    if name in ("HMMA", "HGMMA"):
        return "HMMA"
    if name in ("MUFU", "LDGSTS", "SHFL"):
        return name
    if name in CONVERSIONS:
        return "MUFU"
    if name in SHARED:
        return "LDSM"
    if name in CONTROL:
        return "branch"
    if name in MEMORY:
        return "memory"
    return "FMA" if name in FMA else "ALU"


# ---- parsing

class Instruction:
    def __init__(self, address, guard, opcode, operands, targets):
        self.address, self.guard, self.opcode, self.operands, self.targets = address, guard, opcode, operands, targets
        self.name, *self.flags = opcode.split(".")
        if self.name in UNIFORM:
            self.name = self.name[1:]


class Kernel:
    """One kernel's instructions in order, the positions of its labels, and the constants that the compiler created for
    it."""

    def __init__(self, name):
        self.name, self.code, self.labels, self.constants, self.at = name, [], {}, b"", {}


LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def split_operands(text):
    depth, parts = 0, [""]
    for c in text:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip().replace(".reuse", "") for p in parts if p.strip()]


def parse(text):
    """{kernel: Kernel} from nvdisasm's text of a cubin."""
    kernels, kernel, constants = {}, None, None
    for line in text.splitlines():
        section = re.match(r"\s*\.section\s+(\.[\w.$]+?)\.(\w+),", line) if ".section" in line else None
        if section:
            kernel = kernels.setdefault(section[2], Kernel(section[2])) if section[1] == ".text" else None
            constants = kernels.setdefault(section[2], Kernel(section[2])) if section[1] == ".nv.constant2" else None
            continue
        if constants is not None:
            data = re.search(r"\.byte\s+(.*)", line)
            if data:
                constants.constants += bytes(int(x, 16) for x in data[1].split(","))
            continue
        if kernel is None:
            continue
        label = re.match(r"(\.L_x_\d+|\$?[\w$]+):", line)
        if label:
            kernel.labels[label[1]] = len(kernel.code)
            continue
        found = LINE.match(line)
        if found:
            operands = re.sub(r"\(\*.*?\*\)", "", found[4])
            targets = re.findall(r"`\(([^)]*)\)", operands)
            kernel.at[int(found[1], 16)] = len(kernel.code)
            kernel.code.append(Instruction(int(found[1], 16), found[2], found[3], split_operands(operands), targets))
    return {name: k for name, k in kernels.items() if k.code}


# ---- values: 32-bit integers, which may be the bits of floats; None is unknown

def signed(x):
    return x - (1 << 32) if x & 0x80000000 else x


def to_float(bits):
    return None if bits is None else struct.unpack("<f", struct.pack("<I", bits))[0]


def from_float(x):
    if x is None:
        return None
    try:
        return struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        return 0xFF800000 if x < 0 else 0x7F800000


COMPARE = {"EQ": lambda a, b: a == b, "NE": lambda a, b: a != b, "LT": lambda a, b: a < b, "LE": lambda a, b: a <= b,
           "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b}


def combine(how, a, b):
    """Combines two predicates by AND, OR or XOR; None is an unknown one."""
    if how == "OR":
        return True if a or b else None if a is None or b is None else False
    if how == "XOR":
        return None if a is None or b is None else a != b
    return False if a is False or b is False else None if a is None or b is None else True


def negate(p):
    return None if p is None else not p


class Trace:
    """One warp's path. `parameters` are the bytes of the kernel's arguments, which constant bank 0 holds from 0x210
    on."""

    PARAMETERS = 0x210          # of sm_90

    def __init__(self, kernel, parameters, block, grid, threads, thread=0, shared=(), drawn=(), most=3_000_000):
        self.kernel, self.registers, self.partial, self.predicates = kernel, {}, {}, {}
        self.shared, self.drawn = dict(shared), list(drawn)     # {address: 32 bits}
        bank = bytearray(self.PARAMETERS) + parameters
        struct.pack_into("<6I", bank, 0, threads, 1, 1, *grid)
        self.bank = bytes(bank)
        self.special = {"SR_TID.X": thread, "SR_TID.Y": 0, "SR_TID.Z": 0, "SR_CTAID.X": block[0],
                        "SR_CTAID.Y": block[1], "SR_CTAID.Z": block[2], "SR_LANEID": thread % 32,
                        "SR_LTMASK": (1 << thread % 32) - 1, "SR_CgaCtaId": 0}
        self.issued, self.opcodes, self.assumed = Counter(), Counter(), Counter()
        self.work = Counter()       # of wgmma and shared memory; see work_of()
        self.run(most)

    # -- operands

    def constant(self, text):
        found = re.fullmatch(r"c\[(0x\w+)\]\[(?:(U?R\w+)(?:\+(-?0x\w+))?|(0x\w+))\]", text)
        if not found:
            return None, None
        offset = int(found[4], 16) if found[4] else self.register(found[2])
        if offset is None:
            return None, None
        bank = self.bank if found[1] == "0x0" else self.kernel.constants if found[1] == "0x2" else b""
        return bank, offset + int(found[3] or "0", 16)

    def load_constant(self, text, words=1):
        bank, offset = self.constant(text)
        at = [offset + 4 * i for i in range(words)]
        return [int.from_bytes(bank[k:k + 4], "little") if bank and k + 4 <= len(bank) else None for k in at]

    def register(self, name):
        return 0 if name in ("RZ", "URZ") else self.registers.get(name.split(".")[0])

    def value(self, text, floats=False):
        minus, text = text.startswith("-"), text.removeprefix("-")
        inverted, text = text.startswith("~"), text.removeprefix("~")
        absolute, text = text.startswith("|"), text.strip("|")
        if text.startswith("c["):
            x = self.load_constant(text)[0]
        elif re.match(r"U?R(Z|\d)", text):
            x = self.register(text)
        elif text.startswith("0x"):
            x = int(text, 16) & MASK
        elif re.match(r"[+]?(INF|QNAN|SNAN)|[\d.]", text):
            is_float = floats or not text.isdigit()
            x = from_float(float(text.replace("QNAN", "nan").replace("SNAN", "nan"))) if is_float else int(text)
        else:
            x = None
        if x is None:
            return None
        if floats:
            x = x & 0x7FFFFFFF if absolute else x
            return x ^ 0x80000000 if minus else x
        x = abs(signed(x)) if absolute else x
        return (-x if minus else ~x if inverted else x) & MASK

    def pair(self, text):
        """64 bits, from a pair of registers or of constants."""
        if text.startswith("c["):
            low, high = self.load_constant(text, 2)
        else:
            found = re.fullmatch(r"(-?)(U?R)(Z|\d+)(?:\.64)?", text)
            if not found:
                x = self.value(text)
                return None if x is None else signed(x) & 0xFFFFFFFFFFFFFFFF
            if found[3] == "Z":
                return 0
            low, high = self.register(found[2] + found[3]), self.register(f"{found[2]}{int(found[3]) + 1}")
            if found[1] and None not in (low, high):
                return -(low | high << 32) & 0xFFFFFFFFFFFFFFFF
        return None if low is None or high is None else low | high << 32

    def predicate(self, text):
        inverted, name = text.startswith("!"), text.lstrip("!")
        p = True if name in ("PT", "UPT") else self.predicates.get(name)
        return negate(p) if inverted else p

    def set(self, name, x, words=1):
        found = re.fullmatch(r"(U?R)(\d+)", name.split(".")[0])
        if not found:
            return
        for i in range(words):
            register = f"{found[1]}{int(found[2]) + i}"
            self.registers[register] = None if x is None else x >> 32 * i & MASK
            self.partial.pop(register, None)

    def known(self, text):
        """(value, mask of the bits that are known). The compiler keeps predicates in the bits of a register."""
        x = self.value(text)
        return self.partial.get(text.split(".")[0], (0, 0)) if x is None else (x, MASK)

    def set_known(self, name, x, mask):
        self.set(name, x & MASK if mask == MASK else None)
        if 0 < mask < MASK:
            self.partial[name.split(".")[0]] = x & mask, mask

    def set_predicate(self, name, p):
        if name not in ("PT", "UPT"):
            self.predicates[name] = p

    # -- control

    def run(self, most):
        at, code = 0, self.kernel.code
        while at is not None:
            i = code[at]
            self.issued[pipe(i.opcode)] += 1
            self.opcodes[i.opcode] += 1
            self.work.update(self.work_of(i))
            most -= 1
            if most < 0:
                raise RuntimeError(f"{self.kernel.name}: no end after that many instructions, near {i.address:#x}")
            at = self.step(i, at)

    def goes(self, i, at):
        """True if the branch is taken. If its condition is unknown, the path that calls nothing is taken, or else it
        falls through."""
        condition = self.predicate(i.guard) if i.guard else True
        if i.name == "BRA" and "DIV" in i.flags:
            return False                                        # lanes agree
        for operand in i.operands[:-1]:
            if re.fullmatch(r"!?U?P\w", operand):
                condition = combine("AND", condition, self.predicate(operand))
        if condition is None:
            condition = self.calls(at + 1) and not self.calls(self.kernel.labels[i.targets[0]])
            self.assumed[i.address] += 1
        return condition

    def calls(self, at):
        """True if the path that starts here calls a subroutine before it branches."""
        for i in self.kernel.code[at:at + 40]:
            if i.name == "CALL":
                return True
            if i.name in ("BRA", "BRX", "RET", "EXIT", "BSYNC"):
                return False
        return False

    def step(self, i, at):
        """Executes one instruction; returns the index of the next, or None at the end."""
        if i.name == "BRA":
            return self.kernel.labels[i.targets[0]] if self.goes(i, at) else at + 1
        guard = self.predicate(i.guard) if i.guard else True
        if i.name in ("EXIT", "CALL", "RET", "BRX"):
            if guard is None:
                self.assumed[i.address] += 1
            if not guard:
                return at + 1
            if i.name == "EXIT":
                return None
            if i.name == "CALL":
                return self.kernel.labels[i.targets[0]]
            base = self.register(i.operands[0].split()[0])
            if base is None:
                raise RuntimeError(f"{self.kernel.name}: {i.opcode} at {i.address:#x} depends on an unknown register")
            if i.name == "BRX":
                base = (base + int(i.operands[0].split()[1], 16) + i.address + 16) & MASK
            return self.kernel.at[base]
        if guard is not False:
            self.execute(i, guard is None)
        return at + 1

    # -- arithmetic

    def execute(self, i, perhaps):
        """perhaps: whether the instruction takes effect is unknown, and so its results are unknown."""
        method = getattr(self, "do_" + i.name, None)
        if method and not perhaps:
            method(i, i.operands, i.flags)
        elif i.name == "LOP3" and not re.fullmatch(r"U?P\w", i.operands[0]):
            before = self.known(i.operands[0])
            self.do_LOP3(i, i.operands, i.flags)
            after = self.known(i.operands[0])
            self.set_known(i.operands[0], after[0], before[1] & after[1] & ~(before[0] ^ after[0]))
        elif i.operands and i.name not in CONTROL + ("STG", "STL", "LDGSTS", "REDG", "RED"):
            self.forget(i)

    def forget(self, i):
        """Marks what the instruction writes as unknown."""
        def is_predicate(n):
            return n < len(i.operands) and re.fullmatch(r"U?P\w", i.operands[n])

        if i.name in ("STS", "STSM"):
            self.store_shared(i, [None] * self.width(i))
            return
        first = is_predicate(0)
        destinations = 2 if first and (is_predicate(1) or i.name in ("SHFL", "LOP3", "ATOMG")) else 1
        if not first and i.name in ("IADD3", "IMAD", "LEA"):
            while is_predicate(destinations):
                destinations += 1
        for name in i.operands[:destinations]:
            if re.fullmatch(r"U?P\w", name):
                self.set_predicate(name, None)
            else:
                self.set(name, None, self.width(i))

    @staticmethod
    def width(i):
        if i.name == "HGMMA":
            return int(i.flags[0].split("x")[1]) // 2
        if i.name == "HMMA" or "128" in i.flags or (i.name in ("LDSM", "STSM") and "4" in i.flags):
            return 4
        wide = {"64", "WIDE", "F64", "2", "U64", "S64"} & set(i.flags) or i.name in ("CS2R", "DADD", "DMUL", "DFMA")
        return 2 if wide else 1

    def do_MOV(self, i, o, flags):
        self.set(o[0], self.value(o[1]))

    do_R2UR = do_MOV

    def do_S2R(self, i, o, flags):
        self.set(o[0], self.special.get(o[1]))

    do_S2UR = do_S2R

    def do_CS2R(self, i, o, flags):
        self.set(o[0], 0 if o[1] == "SRZ" else None, 1 if "32" in flags else 2)

    def do_LDC(self, i, o, flags):
        words = self.load_constant(o[1], 2 if "64" in flags else 1)
        self.set(o[0], None if None in words else sum(x << 32 * n for n, x in enumerate(words)), len(words))

    def work_of(self, i):
        """The multiply-adds of a wgmma and the bytes of its operands in shared memory, both of the whole warpgroup; the
        bytes that the lanes of the warp load from shared memory or store in it."""
        if i.name == "HGMMA":       # D, A if it is in registers, descriptors
            m, n, k = map(int, i.flags[0].split("x"))
            return {"macs": m * n * k, "operands": 2 * k * (n if i.operands[1].startswith("R") else m + n)}
        return {"lanes": 32 * 4 * self.width(i)} if i.name in SHARED else {}

    # -- shared memory, as {address: word}

    def address(self, text):
        """Of an operand such as [R4+UR7+0x8]."""
        parts = [self.value(x.split(".")[0]) for x in text.strip("[]").replace("+-", "+ -").split("+")]
        return None if None in parts else sum(parts) & MASK

    def store_shared(self, i, words):
        """Words that are None are unknown from now on, and if the address is unknown, so is everything."""
        at = self.address(i.operands[0])
        if at is None:
            self.shared.clear()
            return
        for n, x in enumerate(words):
            self.shared.pop(at + 4 * n, None)
            if x is not None:
                self.shared[at + 4 * n] = x

    def do_STS(self, i, o, flags):
        found = re.fullmatch(r"(U?R)(Z|\d+)", o[1])
        words = [self.register(found[1] + (found[2] if found[2] == "Z" else str(int(found[2]) + n)))
                 for n in range(self.width(i))]
        self.store_shared(i, words if not {"U8", "U16", "S8", "S16"} & set(flags) else [None])

    def do_LDS(self, i, o, flags):
        at = self.address(o[1])
        words = [None if at is None else self.shared.get(at + 4 * n) for n in range(self.width(i))]
        first = int(re.fullmatch(r"R(\d+)", o[0])[1])
        for n, x in enumerate(words):
            self.set(f"R{first + n}", x if not {"U8", "U16", "S8", "S16"} & set(flags) else None)

    def do_ATOMG(self, i, o, flags):
        self.forget(i)
        self.set(o[1], self.drawn.pop(0) if self.drawn else None)

    # All lanes agree. But an atomic addition is one for all active lanes: the last of them adds the sum, and each lane
    # takes its share. The followed lane does that as if it were the only one.

    def do_VOTE(self, i, o, flags):
        agreed = self.predicate(o[-1])
        self.forget(i)
        if len(o) == 2 and re.fullmatch(r"U?P\w", o[0]):
            self.set_predicate(o[0], agreed)
        elif "ANY" in flags and o[1:] in (["PT", "PT"], ["UPT", "PT"]):
            self.set(o[0], 1 << self.special["SR_LANEID"])

    do_VOTEU = do_VOTE

    def do_SHFL(self, i, o, flags):
        x = self.value(o[2]) if "IDX" in flags and self.value(o[3]) == self.special["SR_LANEID"] else None
        self.forget(i)
        self.set(o[1], x)

    def do_FLO(self, i, o, flags):
        x = self.value(o[1])
        self.set(o[0], x.bit_length() - 1 & MASK if x is not None and flags == ["U32"] else None)

    def do_POPC(self, i, o, flags):
        x = self.value(o[1])
        self.set(o[0], None if x is None else x.bit_count())

    @staticmethod
    def carried(o):
        """(destination, carries out, the remaining operands)"""
        n = 1
        while re.fullmatch(r"U?P\w", o[n]):
            n += 1
        return o[0], o[1:n], o[n:]

    def do_IADD3(self, i, o, flags):
        to, carries, rest = self.carried(o)
        parts = [self.value(x) for x in rest[:3]] + [self.predicate(x) for x in rest[3:] if "X" in flags]
        total = None if None in parts else sum(parts)
        self.set(to, None if total is None else total & MASK)
        for n, name in enumerate(carries):
            self.set_predicate(name, None if total is None else total >> 32 > n)

    def do_VIADD(self, i, o, flags):
        parts = [self.value(x) for x in o[1:3]]
        self.set(o[0], None if None in parts else sum(parts) & MASK)

    def do_IMAD(self, i, o, flags):
        to, carries, rest = self.carried(o)
        wide, high = "WIDE" in flags, "HI" in flags
        a, b = self.value(rest[0]), self.value(rest[1])
        c = self.pair(rest[2]) if wide or high else self.value(rest[2])
        carry = self.predicate(rest[3]) if "X" in flags and len(rest) > 3 else False
        if c is None or carry is None or (a is None or b is None) and 0 not in (a, b):
            self.set(to, None, 2 if wide else 1)
            for name in carries:
                self.set_predicate(name, None)
            return
        a, b = (a or 0, b or 0) if "U32" in flags or not (wide or high) else (signed(a or 0), signed(b or 0))
        total = (a * b & (0xFFFFFFFFFFFFFFFF if wide or high else MASK)) + c + carry
        for name in carries:
            self.set_predicate(name, bool(total >> (64 if wide else 32)))
        self.set(to, total >> 32 & MASK if high else total & (0xFFFFFFFFFFFFFFFF if wide else MASK), 2 if wide else 1)

    def do_LEA(self, i, o, flags):
        to, carries, rest = self.carried(o)
        a, b = self.value(rest[0]), self.value(rest[1])
        high = "HI" in flags
        if high:
            c = (MASK if a and a >> 31 else 0) if "SX32" in flags else self.value(rest[2])
            rest = rest[:2] + rest[2 + ("SX32" not in flags):]
        else:
            c = 0
        carry = self.predicate(rest[3]) if "X" in flags else False
        if None in (a, b, c, carry):
            self.set(to, None)
            for name in carries:
                self.set_predicate(name, None)
            return
        shifted = (c << 32 | a) << int(rest[2], 16)
        total = (shifted >> 32 & MASK if high else shifted & MASK) + b + carry
        self.set(to, total & MASK)
        for name in carries:
            self.set_predicate(name, total >> 32 > 0)

    def do_SHF(self, i, o, flags):
        low, by, high = self.value(o[1]), self.value(o[2]), self.value(o[3])
        if None in (low, by, high):
            self.set(o[0], None)
            return
        wide, by = high << 32 | low, by & 63 if "W" not in flags else by & 31
        if "S32" in flags or "S64" in flags:
            wide -= (high >> 31) << 64
        wide = wide << by if "L" in flags else wide >> by
        self.set(o[0], wide >> 32 & MASK if "HI" in flags else wide & MASK)

    def do_LOP3(self, i, o, flags):
        predicate, o = (o[0], o[1:]) if re.fullmatch(r"U?P\w", o[0]) else (None, o)
        (a, a_known), (b, b_known), (c, c_known) = (self.known(x) for x in o[1:4])
        table, one, zero = int(o[4], 16), 0, 0                      # the bits that may be 1, and those that may be 0
        for n in range(8):
            possible = MASK
            for x, known, bit in ((a, a_known, n & 4), (b, b_known, n & 2), (c, c_known, n & 1)):
                possible &= (x if bit else ~x) | ~known
            if table >> n & 1:
                one |= possible
            else:
                zero |= possible
        self.set_known(o[0], one, ~(one & zero) & MASK)
        if predicate:                                               # whether any bit is 1
            self.set_predicate(predicate, True if one & ~zero & MASK else None if one & MASK else False)

    def do_PLOP3(self, i, o, flags):
        for name, table in zip(o[:2], (int(o[5], 16), int(o[6], 16))):
            parts, seen = [self.predicate(x) for x in o[2:5]], set()
            for n in range(8):
                if all(p is None or p == bool(n & bit) for p, bit in zip(parts, (4, 2, 1))):
                    seen.add(table >> n & 1)
            self.set_predicate(name, bool(seen.pop()) if len(seen) == 1 else None)

    def compare(self, o, flags, known, a, b, equal_low=None):
        how = next(f for f in flags if f in COMPARE)
        p = COMPARE[how](a, b) if known else None
        bool_op = next(f for f in flags if f in ("AND", "OR", "XOR"))
        self.set_predicate(o[0], combine(bool_op, p, self.predicate(o[4])))
        self.set_predicate(o[1], combine(bool_op, negate(p), self.predicate(o[4])))

    def do_ISETP(self, i, o, flags):
        a, b = self.value(o[2]), self.value(o[3])
        known = a is not None and b is not None
        if known and "U32" not in flags:
            a, b = signed(a), signed(b)
        if "EX" in flags:                           # of the high words; the result for the low words comes last
            low = self.predicate(o[5])
            how = next(f for f in flags if f in COMPARE)
            if known and a == b:
                known, a, b, flags = low is not None, int(bool(low)), 1, ["EQ" if f == how else f for f in flags]
            elif known and how in ("GE", "LE"):
                flags = [{"GE": "GT", "LE": "LT"}.get(f, f) for f in flags]
        self.compare(o, flags, known, a, b)

    def do_FSETP(self, i, o, flags):
        a, b = to_float(self.value(o[2], True)), to_float(self.value(o[3], True))
        known = a is not None and b is not None
        how = next(f for f in flags if f.rstrip("U") in COMPARE or f in ("NEU", "EQU", "NAN", "NUM"))
        if how in ("NAN", "NUM"):
            self.set_predicate(o[0], None)
            self.set_predicate(o[1], None)
            return
        unordered = known and (a != a or b != b)
        if unordered:
            a, b = (0, 0) if (how[:2] in ("EQ", "GE", "LE")) == how.endswith("U") else (0, 0)
            known = False
        self.compare(o, [how[:2] if f == how else f for f in flags], known, a, b)

    def do_FCHK(self, i, o, flags):
        self.set_predicate(o[0], False)             # a division of ordinary numbers

    def do_SEL(self, i, o, flags):
        p = self.predicate(o[3])
        a, b = self.value(o[1]), self.value(o[2])
        self.set(o[0], (a if a == b else None) if p is None else a if p else b)

    def do_FSEL(self, i, o, flags):
        p = self.predicate(o[3])
        self.set(o[0], None if p is None else self.value(o[1] if p else o[2], True))

    def do_VIMNMX(self, i, o, flags):
        self.extreme(o[0], self.value(o[1]), self.value(o[2]), self.predicate(o[3]), "U32" in flags)

    do_IMNMX = do_VIMNMX

    def do_VIADDMNMX(self, i, o, flags):
        a, b = self.value(o[1]), self.value(o[2])
        self.extreme(o[0], None if None in (a, b) else (a + b) & MASK, self.value(o[3]), self.predicate(o[4]),
                     "U32" in flags)

    def extreme(self, to, a, b, least, unsigned):
        if None in (a, b, least):
            self.set(to, None)
            return
        self.set(to, (min if least else max)(a, b, key=(lambda x: x) if unsigned else signed))

    def do_IABS(self, i, o, flags):
        x = self.value(o[1])
        self.set(o[0], None if x is None else abs(signed(x)))

    def do_P2R(self, i, o, flags):
        mask, bits = self.value(o[3]), 0
        for n in range(7):
            if mask >> n & 1:
                p = self.predicate(f"P{n}")
                if p is None:
                    bits = None
                    break
                bits |= p << n
        self.set(o[0], bits)

    def do_R2P(self, i, o, flags):
        x, mask = self.value(o[1]), self.value(o[2])
        for n in range(7):
            if mask >> n & 1:
                self.set_predicate(f"P{n}", None if x is None else bool(x >> n & 1))

    def floats(self, o, f):
        parts = [to_float(self.value(x, True)) for x in o[1:]]
        self.set(o[0], None if None in parts else from_float(f(*parts)))

    def do_FADD(self, i, o, flags):
        self.floats(o[:3], lambda a, b: a + b)

    def do_FMUL(self, i, o, flags):
        self.floats(o[:3], lambda a, b: a * b)

    def do_FFMA(self, i, o, flags):
        self.floats(o[:4], lambda a, b, c: a * b + c)

    def do_MUFU(self, i, o, flags):
        x = to_float(self.value(o[1], True))
        if "RCP" in flags and x:
            self.set(o[0], from_float(1 / x))
        elif "RSQ" in flags and x and x > 0:
            self.set(o[0], from_float(x ** -0.5))
        else:
            self.set(o[0], None)

    def do_I2F(self, i, o, flags):
        x = self.value(o[1])
        if "F64" in flags:
            self.set(o[0], None, 2)
        else:
            self.set(o[0], None if x is None else from_float(float(x if "U32" in flags else signed(x))))

    do_I2FP = do_I2F

    def do_HFMA2(self, i, o, flags):
        """Only as a move of two constant halves."""
        halves = [float(x) for x in o[3:5]] if [x.lstrip("-") for x in o[1:3]] == ["RZ", "RZ"] and all(
            re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", x) for x in o[3:5]) else None
        self.set(o[0], halves and int.from_bytes(struct.pack("<ee", *reversed(halves)), "little"))

    def do_F2I(self, i, o, flags):
        x = to_float(self.value(o[1], True))
        self.set(o[0], None if x is None or x != x or abs(x) > 2 ** 63 else int(x) & MASK)
