// Labels of the time axis, from nanoseconds. Zoomed in far from zero, full labels would differ only in their last
// digits: the first tick has the full time, the others their distance from it.
const step_ns = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(tick) || 1
const largest_ns = Math.max(...ticks.map(Math.abs))
const units = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]]
const unit_for = (ns) => units.find(([, size]) => ns >= size * 0.999) ?? units[3]
const text = (ns, [unit, size]) => {
  const digits = Math.max(0, Math.min(9, Math.ceil(Math.log10(size / step_ns) - 1e-9)))
  return (ns / size).toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits}) + " " + unit
}
if (largest_ns < step_ns * 2000) return text(tick, unit_for(largest_ns))
if (index === 0) return text(tick, unit_for(largest_ns))
return "+" + text(tick - ticks[0], unit_for(step_ns * (ticks.length - 1)))
