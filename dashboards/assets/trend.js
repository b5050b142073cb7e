// The tooltip of a trend shows the step below the pointer; a click opens that step in the timeline.
window.overlapscope.startTrend = (plot, source) => {
  const readout = document.querySelector(`[data-readout="${plot.name}"]`)
  const idle = readout.textContent

  function nearest(x) {
    const steps = source.data.step
    let best = 0
    for (let i = 1; i < steps.length; i++) if (Math.abs(steps[i] - x) < Math.abs(steps[best] - x)) best = i
    return best
  }

  plot.on_event("mousemove", ({x}) => (readout.textContent = source.data.text[nearest(x)] ?? idle))
  plot.on_event("mouseleave", () => (readout.textContent = idle))
  if (document.body.dataset.timeline) {
    plot.on_event("tap", ({x}) => {
      const at = nearest(x)
      if (Number.isFinite(source.data.mean[at])) window.overlapscope.openTimeline({step: source.data.step[at]})
    })
  }
  window.overlapscope.paintPlots()
}
