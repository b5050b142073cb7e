// A trend says above it what the step below the pointer took; a click opens that step in the timeline.
window.overlapscope.startTrend = (plot, source) => {
  const readout = document.querySelector(`[data-readout="${plot.name}"]`)

  function nearest(x) {
    const steps = source.data.step
    let best = 0
    for (let i = 1; i < steps.length; i++) if (Math.abs(steps[i] - x) < Math.abs(steps[best] - x)) best = i
    return best
  }

  plot.on_event("mousemove", ({x}) => (readout.textContent = source.data.text[nearest(x)] ?? ""))
  plot.on_event("mouseleave", () => (readout.textContent = ""))
  if (document.body.dataset.timeline) {
    plot.on_event("tap", ({x}) => {
      const at = nearest(x)
      if (Number.isFinite(source.data.middle[at])) window.overlapscope.openTimeline({step: source.data.step[at]})
    })
  }
  window.overlapscope.paintPlots()
}
