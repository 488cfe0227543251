// The elements of a tensor: bit patterns, numbers, distances between two sides, and who holds what.
//
// Written for the page of a failure (failure.js). A side is described as harness/shardproof/tensor_pictures.py packs it; what a number does
// not say (a NaN's payload, the sign of a zero) is told here as in harness/shardproof/report/bits.py.
"use strict";

const KINDS = {
  fp64: { bytes: 8, exponent: 11, mantissa: 52 }, fp32: { bytes: 4, exponent: 8, mantissa: 23 },
  fp16: { bytes: 2, exponent: 5, mantissa: 10 }, bf16: { bytes: 2, exponent: 8, mantissa: 7 },
  fp8e4m3: { bytes: 1, exponent: 4, mantissa: 3, finite: true }, fp8e5m2: { bytes: 1, exponent: 5, mantissa: 2 },
  int64: { bytes: 8, signed: true }, int32: { bytes: 4, signed: true }, int16: { bytes: 2, signed: true },
  int8: { bytes: 1, signed: true }, uint64: { bytes: 8 }, uint32: { bytes: 4 }, uint16: { bytes: 2 },
  uint8: { bytes: 1 }, bool: { bytes: 1 },
};
class Side {
  constructor(described, body) {
    this.dtype = described.dtype;
    this.shape = described.shape;
    this.kind = KINDS[described.dtype];
    this.view = new DataView(body.buffer, body.byteOffset + described.at, described.length);
    this.length = described.length / this.kind.bytes;
    this.holes = described.holes;
  }

  has(at) {
    return at >= 0 && at < this.length && !this.holes.some(([start, n]) => at >= start && at < start + n);
  }

  pattern(at) {
    switch (this.kind.bytes) {
      case 8: return this.view.getBigUint64(8 * at, true);
      case 4: return BigInt(this.view.getUint32(4 * at, true));
      case 2: return BigInt(this.view.getUint16(2 * at, true));
      default: return BigInt(this.view.getUint8(at));
    }
  }

  number(at) {
    const { bytes, exponent, mantissa, signed, finite } = this.kind;
    if (!exponent) return signed ? BigInt.asIntN(8 * bytes, this.pattern(at)) : this.pattern(at);
    if (this.dtype === "fp64") return this.view.getFloat64(8 * at, true);
    if (this.dtype === "fp32") return this.view.getFloat32(4 * at, true);
    const { sign, high, low } = this.parts(at);
    const full = 2 ** exponent - 1, bias = 2 ** (exponent - 1) - 1, ones = 2 ** mantissa - 1;
    if (high === full && (finite ? low === ones : low)) return NaN;
    if (high === full && !finite) return sign ? -Infinity : Infinity;
    const size = high ? (1 + low / 2 ** mantissa) * 2 ** (high - bias) : (low / 2 ** mantissa) * 2 ** (1 - bias);
    return sign ? -size : size;
  }

  parts(at) {
    const { bytes, exponent, mantissa } = this.kind, pattern = this.pattern(at);
    const low = pattern & ((1n << BigInt(mantissa)) - 1n);
    const high = (pattern >> BigInt(mantissa)) & ((1n << BigInt(exponent)) - 1n);
    return { sign: Number(pattern >> BigInt(8 * bytes - 1)), high: Number(high), low: Number(low) };
  }

  isNaN(at) {
    return Boolean(this.kind.exponent) && Number.isNaN(this.number(at));
  }

  text(at) {
    const number = this.number(at);
    if (this.dtype === "bool") return number ? "true" : "false";
    if (Object.is(number, -0)) return "-0";
    return this.kind.exponent && this.kind.bytes < 8 ? String(Number(number.toPrecision(9))) : String(number);
  }

  hexadecimal(at) {
    return "0x" + this.pattern(at).toString(16).padStart(2 * this.kind.bytes, "0");
  }

  // What a number does not say: a NaN's payload, the sign of a zero, a subnormal.
  meaning(at) {
    const { exponent, mantissa, finite } = this.kind;
    if (!exponent) return "";
    const { sign, high, low } = this.parts(at), number = this.number(at);
    if (Number.isNaN(number)) {
      if (finite) return "NaN";
      const payload = this.pattern(at) & ((1n << BigInt(mantissa - 1)) - 1n);
      const quiet = (this.pattern(at) >> BigInt(mantissa - 1)) & 1n;
      return `${quiet ? "quiet" : "signalling"} NaN, payload 0x${payload.toString(16)}`;
    }
    if (!Number.isFinite(number)) return sign ? "minus infinity" : "infinity";
    if (!high) return low ? "subnormal" : sign ? "negative zero" : "zero";
    return "";
  }

  digits(at) {
    const text = this.pattern(at).toString(2).padStart(8 * this.kind.bytes, "0");
    if (!this.kind.exponent) return [["bits", text]];
    const end = 1 + this.kind.exponent;
    return [["sign", text[0]], ["exponent", text.slice(1, end)], ["mantissa", text.slice(end)]];
  }
}

class Picture {
  constructor(described, body) {
    Object.assign(this, described);
    const sides = ["expected", "observed"];
    for (const side of sides) this[side] = described[side] ? new Side(described[side], body) : null;
    this.lead = this.observed || this.expected;
    this.shape = this.lead.shape;
    this.length = Math.max(...sides.map((side) => this[side]?.length ?? 0));
    const [a, b] = [this.expected, this.observed];
    this.comparable = Boolean(a && b && a.dtype === b.dtype && String(a.shape) === String(b.shape));
    this.wrong = [];
    for (let at = 0; at < this.length; at++) if (this.differs(at)) this.wrong.push(at);
    this.bands = bands(this);
  }

  differs(at) {
    const [a, b] = [this.expected, this.observed];
    if (!a?.has(at) || !b?.has(at)) return true;
    return a.dtype === b.dtype ? a.pattern(at) !== b.pattern(at) : a.number(at) != b.number(at);
  }

  // Representable numbers between both sides, as a BigInt; null where that has no meaning.
  distance(at) {
    const [a, b] = [this.expected, this.observed];
    if (!this.comparable || !a.has(at) || !b.has(at) || a.isNaN(at) || b.isNaN(at) || a.dtype === "bool") return null;
    if (!a.kind.exponent) return abs(BigInt(a.number(at)) - BigInt(b.number(at)));
    const top = 1n << BigInt(8 * a.kind.bytes - 1);
    const ordered = (pattern) => (pattern & top ? -(pattern ^ top) : pattern);
    return abs(ordered(a.pattern(at)) - ordered(b.pattern(at)));
  }

  index(at) {
    let flat = this.first + at;
    const found = [];
    for (const n of [...this.shape].reverse()) {
      found.unshift(flat % n);
      flat = Math.floor(flat / n);
    }
    return `[${found.join(", ")}]`;
  }
}

const abs = (n) => (n < 0n ? -n : n);

// Who holds each element, as the number of a band; bands are the different sets of ranks.
function bands(picture) {
  const holders = Array.from({ length: picture.length }, () => new Set());
  const strides = picture.shape.map((_, dim) => picture.shape.slice(dim + 1).reduce((a, b) => a * b, 1));
  for (const { ranks, start, size, flat } of picture.owners) {
    for (let at = 0; at < picture.length; at++) {
      const whole = picture.first + at;
      const inside = flat
        ? whole >= start[0] && whole < start[0] + size[0]
        : picture.shape.every((n, dim) => {
          const place = Math.floor(whole / strides[dim]) % n;
          return place >= start[dim] && place < start[dim] + size[dim];
        });
      if (inside) ranks.forEach((rank) => holders[at].add(rank));
    }
  }
  const names = [];
  const of = holders.map((ranks) => {
    const name = [...ranks].sort((a, b) => a - b).join(", ");
    if (name && !names.includes(name)) names.push(name);
    return names.indexOf(name);
  });
  return { names, of };
}
