// Ruler between two points on the lanes of a rank. The server computes what lies between.
window.overlapscope.ruler = ({area, timeAt, rankAt, plot}) => {
  const note = document.getElementById("ruler-note")
  let first = null
  let asked = 0
  let waiting = false
  let next = null

  function ask() {
    waiting = true
    asked += 1
    plot.measured.data = {id: [asked], from_ns: [first.time], to_ns: [next], rank: [first.rank]}
    next = null
  }

  function measureTo(from, {time}) {
    first = from
    next = time
    if (!waiting) ask()
  }

  function answered() {
    const {id, text} = plot.ruler.data
    if (id[0] !== asked) return
    waiting = false
    note.textContent = text[0]
    if (next !== null) ask()
  }

  const points = window.overlapscope.twoPoints({
    element: area,
    pointAt: (event) => ({time: timeAt(event), rank: rankAt(event)}),
    moved: measureTo,
    placed: measureTo,
  })

  function begin() {
    remove()
    points.begin()
    note.textContent = "Click two points or drag."
  }

  // Removes the ruler; returns whether there was one.
  function remove() {
    const wasThere = points.isPlacing() || first !== null
    points.stop()
    first = next = null
    waiting = false
    asked += 1
    note.textContent = ""
    if (wasThere) plot.measured.data = {id: [], from_ns: [], to_ns: [], rank: []}
    return wasThere
  }

  plot.ruler.properties.data.change.connect(() => plot.ruler.data.id.length && answered())

  return {begin, remove, isPlacing: points.isPlacing}
}
